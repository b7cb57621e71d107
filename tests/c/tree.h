/* tree.h - a made-up /proc and /sys below a temporary folder.  Needs _GNU_SOURCE. */
#pragma once

#include <ftw.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

static const char template[] = "/tmp/gemini_test_XXXXXX";
static char root[sizeof template];

/* Writes root + path, making its folders. */
__attribute__((format(printf, 2, 3))) static void put(const char *path, const char *format, ...)
{
    char name[PATH_MAX];
    CHECK(snprintf(name, sizeof name, "%s%s", root, path) < (int)sizeof name);
    for (char *slash = strchr(name + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(name, 0777);
        *slash = '/';
    }
    FILE *file = fopen(name, "w");
    CHECK(file);
    va_list args;
    va_start(args, format);
    CHECK(vfprintf(file, format, args) >= 0);
    va_end(args);
    CHECK(fclose(file) == 0);
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *at)
{
    (void)info;
    (void)type;
    (void)at;
    return remove(path);
}

static void make_tree(void)
{
    memcpy(root, template, sizeof root);
    CHECK(mkdtemp(root));
}

static void remove_tree(void)
{
    CHECK(nftw(root, remove_entry, 16, FTW_DEPTH | FTW_PHYS) == 0);
}
