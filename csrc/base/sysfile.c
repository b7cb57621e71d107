/* sysfile.c - reads what the kernel tells in text, and finds this process's control groups. */
#define _GNU_SOURCE /* getline, fopen's "e" */
#include "base/sysfile.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One cgroup hierarchy: version 2, or version 1's with the controller that is asked for. */
typedef struct hierarchy {
    char mount[PATH_MAX]; /* where it is mounted */
    char base[PATH_MAX];  /* which of its folders is mounted there */
    char path[PATH_MAX];  /* this process's folder in it */
} hierarchy;

/* Opens root + folder + name for reading; NULL if that cannot be done. */
static FILE *open_below(const char *root, const char *folder, const char *name)
{
    size_t bytes = strlen(root) + strlen(folder) + strlen(name) + 1;
    char *path = malloc(bytes);
    if (!path) {
        return NULL;
    }
    (void)snprintf(path, bytes, "%s%s%s", root, folder, name);
    FILE *opened = fopen(path, "re");
    free(path);
    return opened;
}

bool gm_sysfile_read(const char *root, const char *folder, const char *name, char *text,
                     size_t bytes)
{
    FILE *file = open_below(root, folder, name);
    if (!file) {
        return false;
    }
    size_t n = fread(text, 1, bytes - 1, file);
    bool is_read = !ferror(file);
    fclose(file);
    text[n] = '\0';
    return is_read;
}

/* Every folder from this process's own up to the mount point limits it. */
static void visit_hierarchy(const char *root, const hierarchy *h, bool is_v2, gm_cgroup_fn fn,
                            void *context)
{
    size_t base_bytes = strcmp(h->base, "/") == 0 ? 0 : strlen(h->base);
    /* A path outside of what is mounted (a container with the host's view) is of no use here. */
    bool is_below = strncmp(h->path, h->base, base_bytes) == 0;
    char folder[2 * PATH_MAX];
    (void)snprintf(folder, sizeof folder, "%s%s", h->mount, is_below ? h->path + base_bytes : "");
    size_t mount_bytes = strlen(h->mount);
    for (;;) {
        fn(context, root, folder, is_v2);
        char *slash = strrchr(folder, '/');
        if (!slash || (size_t)(slash - folder) < mount_bytes) {
            return;
        }
        *slash = '\0';
    }
}

static bool has_word(const char *list, const char *word)
{
    size_t bytes = strlen(word);
    for (const char *at = strstr(list, word); at; at = strstr(at + 1, word)) {
        bool is_start = at == list || at[-1] == ',';
        if (is_start && (at[bytes] == '\0' || at[bytes] == ',')) {
            return true;
        }
    }
    return false;
}

/* Where the hierarchy is mounted, from lines of the form
 * "id parent major:minor base mount options [tags] - type source superoptions". */
static bool find_mount(const char *root, hierarchy *h, const char *controller, bool is_v2)
{
    FILE *file = open_below(root, "", "/proc/self/mountinfo");
    if (!file) {
        return false;
    }
    char *line = NULL;
    size_t capacity = 0;
    bool is_found = false;
    while (!is_found && getline(&line, &capacity, file) > 0) {
        char type[64], options[1024];
        const char *tail = strstr(line, " - ");
        _Static_assert(PATH_MAX == 4096, "the field widths below");
        is_found = tail && sscanf(line, "%*s %*s %*s %4095s %4095s", h->base, h->mount) == 2 &&
                   sscanf(tail, " - %63s %*s %1023s", type, options) == 2 &&
                   (is_v2 ? strcmp(type, "cgroup2") == 0
                          : strcmp(type, "cgroup") == 0 && has_word(options, controller));
    }
    free(line);
    fclose(file);
    return is_found;
}

/* Lines of /proc/self/cgroup: "0::/path" is version 2, "4:cpu,memory:/path" version 1. */
void gm_sysfile_cgroups(const char *root, const char *controller, gm_cgroup_fn fn, void *context)
{
    FILE *file = open_below(root, "", "/proc/self/cgroup");
    if (!file) {
        return; /* a kernel without cgroups */
    }
    hierarchy *h = malloc(sizeof *h); /* three paths are much for a stack */
    char *line = NULL;
    size_t capacity = 0;
    while (h && getline(&line, &capacity, file) > 0) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) {
            continue;
        }
        *controllers++ = *path++ = '\0';
        bool is_v2 = *controllers == '\0';
        if (!is_v2 && !has_word(controllers, controller)) {
            continue;
        }
        (void)snprintf(h->path, sizeof h->path, "%s", path);
        if (find_mount(root, h, controller, is_v2)) {
            visit_hierarchy(root, h, is_v2, fn, context);
        }
    }
    free(line);
    free(h);
    fclose(file);
}
