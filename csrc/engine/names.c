/* names.c - what texts call units and chunks: "unit layers.4", "chunk 12 (units layers.3 to
 * layers.4)".
 *
 * Communicators ask late, after the engine's end and on any thread: each of them holds a reference.
 * Nothing changes after gm_names_new(). */
#include "engine/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct gm_names {
    atomic_uint references;
    uint32_t n_units, n_chunks;
    char **units;           /* (n_units,) NULL: no memory for it */
    uint32_t *first, *last; /* (n_chunks,) units that need the chunk; n_units: none does */
};

char *gm_names_copy(const char *name)
{
    char *copy = name ? malloc(strlen(name) + 1) : NULL;
    return copy ? strcpy(copy, name) : NULL;
}

static void names_free(gm_names *names)
{
    for (uint32_t unit = 0; names->units && unit < names->n_units; unit++) {
        free(names->units[unit]);
    }
    free(names->units);
    free(names->first);
    free(names->last);
    free(names);
}

gm_status gm_names_new(gm_engine *engine, const gm_engine_options *options)
{
    uint32_t n_chunks = gm_layout_n_chunks(engine->layout);
    gm_names *names = calloc(1, sizeof *names);
    GM_FAIL_IF(!names, GM_ERR_NOMEM, "HOST: names of %u units", options->n_units);
    atomic_init(&names->references, 1);
    names->n_units = options->n_units;
    names->n_chunks = n_chunks;
    names->units = calloc((size_t)options->n_units + 1, sizeof *names->units);
    names->first = malloc(((size_t)n_chunks + 1) * sizeof *names->first);
    names->last = malloc(((size_t)n_chunks + 1) * sizeof *names->last);
    if (!names->units || !names->first || !names->last) {
        names_free(names);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: names of %u units", options->n_units);
    }
    for (uint32_t chunk = 0; chunk < n_chunks; chunk++) {
        names->first[chunk] = names->last[chunk] = options->n_units;
    }
    for (uint32_t unit = 0; unit < options->n_units; unit++) {
        names->units[unit] = gm_names_copy(options->unit_names ? options->unit_names[unit] : NULL);
        for (uint32_t i = engine->unit_begin[unit]; i < engine->unit_begin[unit + 1]; i++) {
            uint32_t chunk = engine->unit_chunks[i];
            names->first[chunk] =
                names->first[chunk] < options->n_units ? names->first[chunk] : unit;
            names->last[chunk] = unit;
        }
    }
    engine->names = names;
    return GM_OK;
}

gm_names *gm_names_ref(gm_names *names)
{
    atomic_fetch_add(&names->references, 1);
    return names;
}

void gm_names_unref(void *names)
{
    if (names && atomic_fetch_sub(&((gm_names *)names)->references, 1) == 1) {
        names_free(names);
    }
}

void gm_names_unit(const gm_names *names, uint32_t unit, char *out, size_t bytes)
{
    const char *name = unit < names->n_units ? names->units[unit] : NULL;
    (void)(name ? snprintf(out, bytes, "%s", name) : snprintf(out, bytes, "%u", unit));
}

void gm_names_chunk(const gm_names *names, uint32_t chunk, char *out, size_t bytes)
{
    uint32_t none = names->n_units;
    if (chunk >= names->n_chunks || names->first[chunk] == none) {
        (void)snprintf(out, bytes, "chunk %u", chunk);
        return;
    }
    char first[72], last[72];
    gm_names_unit(names, names->first[chunk], first, sizeof first);
    gm_names_unit(names, names->last[chunk], last, sizeof last);
    if (names->first[chunk] == names->last[chunk]) {
        (void)snprintf(out, bytes, "chunk %u (unit %s)", chunk, first);
    } else {
        (void)snprintf(out, bytes, "chunk %u (units %s to %s)", chunk, first, last);
    }
}
