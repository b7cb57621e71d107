/* absent.h - host addresses that show NaN: what an absent tensor's storage points at on the
 * host. */
#pragma once

#include "base/base.h"

/* At least `bytes` of address space that read as 0xff everywhere (NaN in every floating-point
 * format) and that nothing can write.  One range serves all, as long as it is large enough; none is
 * ever taken away.  Any thread. */
gm_status gm_absent_range(size_t bytes, uintptr_t *out);
