/* rates.h - how fast this machine copies and updates, measured. */
#ifndef GM_RATES_H
#define GM_RATES_H

#include "plan/budget.h"
#include "device/device.h"
#include "base/workers.h"

/* Measures the rates of `device` and of host Adam on `workers`, in about a second.  Takes for that time at
 * most 256 MiB of device memory and 512 MiB of pinned host memory, and makes do with less of either.
 * GM_ERR_NOMEM where not even a block and 16 MiB are to be had. */
gm_status gm_rates_measure(gm_device *device, gm_workers *workers, gm_rates *out);

#endif
