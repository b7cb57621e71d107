/* stay.c - which chunks stay.
 *
 * 1. Whichever of them did not, the homes would not fit. */
#include "plan/stay.h"

void gm_stay_choose(const size_t *home_bytes, uint32_t n, size_t limit, bool *stays)
{
    size_t all = 0;
    for (uint32_t c = 0; c < n; c++) {
        all += home_bytes[c];
    }
    size_t lacking = all > limit ? all - limit : 0;
    for (uint32_t c = 0; c < n; c++) {
        if (home_bytes[c] > 0 && home_bytes[c] <= lacking) {
            stays[c] = true;
            lacking -= home_bytes[c];
        }
    }
    /* All that are left have more than lacks: the smallest makes up for it, and for others. */
    uint32_t last = n;
    for (uint32_t c = 0; c < n && lacking > 0; c++) {
        bool is_left = !stays[c] && home_bytes[c] > 0;
        last = is_left && (last == n || home_bytes[c] < home_bytes[last]) ? c : last;
    }
    size_t spare = last < n ? home_bytes[last] - lacking : 0;
    for (uint32_t c = n; c-- > 0;) {
        if (stays[c] && home_bytes[c] <= spare) {
            stays[c] = false;
            spare -= home_bytes[c];
        }
    }
    if (last < n) {
        stays[last] = true;
    }
}
