/* fault.c - the seeded faults of the chaos device: their names, and which occurrence is hit. */
#include "chaos/chaos_impl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[GM_CHAOS_N_FAULTS] = {
    [GM_CHAOS_NONE] = "none",
    [GM_CHAOS_NO_WAIT_FOR_COMPUTE] = "no-wait-for-compute",
    [GM_CHAOS_NO_WAIT_OF_COMPUTE] = "no-wait-of-compute",
    [GM_CHAOS_NO_WAIT_BETWEEN] = "no-wait-between",
    [GM_CHAOS_EARLY_RECORD] = "early-record",
    [GM_CHAOS_NO_H2D] = "no-h2d",
    [GM_CHAOS_NO_D2H] = "no-d2h",
    [GM_CHAOS_HALF_COPY] = "half-copy",
    [GM_CHAOS_EARLY_CALL] = "early-call",
    [GM_CHAOS_EARLY_RELEASE] = "early-release",
    [GM_CHAOS_NO_EVENT_SYNC] = "no-event-sync",
    [GM_CHAOS_NO_STREAM_SYNC] = "no-stream-sync",
    [GM_CHAOS_ADAM_TWICE] = "adam-twice",
    [GM_CHAOS_SWAP] = "swap",
};

const char *gm_chaos_fault_name(gm_chaos_fault fault)
{
    return fault >= 0 && fault < GM_CHAOS_N_FAULTS ? names[fault] : "unknown";
}

bool gm_chaos_pick(gm_chaos_device *dev, gm_chaos_fault fault)
{
    uint32_t period = dev->options.fault_period ? dev->options.fault_period : 1;
    /* Which of a period is hit depends on the seed: a program has the same occurrences in each of its runs, and
     * of some the harm is made good by the wait that follows them. */
    if (dev->options.fault != fault ||
        dev->n_occurrences++ % period != dev->options.seed % period) {
        return false;
    }
    dev->n_applied++;
    return true;
}

static gm_status not_understood(const char *text)
{
    char known[256] = "";
    size_t used = 0;
    for (int fault = 0; fault < GM_CHAOS_N_FAULTS && used < sizeof known; fault++) {
        int written =
            snprintf(known + used, sizeof known - used, "%s%s", fault ? ", " : "", names[fault]);
        used += written > 0 ? (size_t)written : 0;
    }
    return GM_FAIL(GM_ERR_ARG,
                   "chaos device: \"%s\" is not \"seed[:fault[:period]]\" with whole numbers, the "
                   "period at least 1, and a fault among: %s",
                   text, known);
}

/* A whole number of decimal digits that ends at `end`. */
static bool read_number(const char *text, char end, uint64_t largest, uint64_t *out,
                        const char **rest)
{
    char *stopped;
    errno = 0;
    unsigned long long value = strtoull(text, &stopped, 10);
    bool has_digit = text[0] >= '0' && text[0] <= '9'; /* no sign, no space */
    *out = value;
    *rest = stopped;
    return has_digit && errno == 0 && value <= largest && (*stopped == end || *stopped == 0);
}

gm_status gm_chaos_parse(const char *text, gm_chaos_options *out)
{
    gm_chaos_options options = {.fault_period = 1};
    const char *rest;
    if (!read_number(text, ':', UINT64_MAX, &options.seed, &rest)) {
        return not_understood(text);
    }
    if (*rest == ':') {
        const char *name = rest + 1;
        size_t length = strcspn(name, ":");
        int fault = 0;
        while (fault < GM_CHAOS_N_FAULTS &&
               (strlen(names[fault]) != length || memcmp(names[fault], name, length) != 0)) {
            fault++;
        }
        if (fault == GM_CHAOS_N_FAULTS) {
            return not_understood(text);
        }
        options.fault = (gm_chaos_fault)fault;
        rest = name + length;
    }
    if (*rest == ':') {
        uint64_t period;
        if (!read_number(rest + 1, 0, UINT32_MAX, &period, &rest) || period == 0) {
            return not_understood(text);
        }
        options.fault_period = (uint32_t)period;
    }
    *out = options;
    return GM_OK;
}
