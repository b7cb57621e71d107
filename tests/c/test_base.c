/* test_base.c - error text: per thread, complete, also when it quotes the previous one. */
#include "base/base.h"

#include <pthread.h>
#include <string.h>

#include "check.h"

static gm_status fails(int value)
{
    return GM_FAIL(GM_ERR_ARG, "value is %d", value);
}

static gm_status passes_on(int value)
{
    GM_TRY(fails(value));
    return GM_OK;
}

static gm_status cleans_up(int value, int *n_cleaned)
{
    gm_status status;
    GM_TRY_GOTO(status, done, fails(value));
done:
    ++*n_cleaned;
    return status;
}

static void *other_thread(void *unused)
{
    (void)unused;
    CHECK(strcmp(gm_last_error(), "") == 0);
    CHECK(fails(2) == GM_ERR_ARG);
    CHECK(strcmp(gm_last_error(), "value is 2") == 0);
    return NULL;
}

int main(void)
{
    CHECK(strcmp(gm_wanted(0).text, "0 B") == 0);
    CHECK(strcmp(gm_there(999).text, "999 B") == 0);
    CHECK(strcmp(gm_wanted(1052672).text, "1.053 MB") == 0);
    CHECK(strcmp(gm_there(1052672).text, "1.052 MB") == 0);
    CHECK(strcmp(gm_there(25769803776).text, "25.76 GB") == 0);
    CHECK(strcmp(gm_wanted(24000000000).text, "24.00 GB") == 0);
    CHECK(strcmp(gm_there(SIZE_MAX).text, "18.44 EB") == 0);

    CHECK(gm_last_error());
    CHECK(passes_on(1) == GM_ERR_ARG);
    CHECK(strcmp(gm_last_error(), "value is 1") == 0);

    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(strcmp(gm_last_error(), "value is 1") == 0);

    CHECK(GM_FAIL(GM_ERR_DEVICE, "outer (%s)", gm_last_error()) == GM_ERR_DEVICE);
    CHECK(strcmp(gm_last_error(), "outer (value is 1)") == 0);

    int n_cleaned = 0;
    CHECK(cleans_up(3, &n_cleaned) == GM_ERR_ARG && n_cleaned == 1);

    char wide[4096];
    memset(wide, 'x', sizeof wide - 1);
    wide[sizeof wide - 1] = '\0';
    CHECK(GM_FAIL(GM_ERR_STATE, "%s", wide) == GM_ERR_STATE);
    CHECK(strlen(gm_last_error()) >= 512 && strlen(gm_last_error()) < sizeof wide);

    const struct {
        uintptr_t begin;
        int other;
    } table[] = {{10, 1}, {20, 2}, {30, 3}};
    CHECK(gm_up_to(table, 3, sizeof *table, 9) == 0 && gm_up_to(table, 3, sizeof *table, 10) == 1);
    CHECK(gm_up_to(table, 3, sizeof *table, 29) == 2 && gm_up_to(table, 3, sizeof *table, 99) == 3);
    CHECK(gm_up_to(NULL, 0, sizeof *table, 5) == 0);

    CHECK(gm_round_up(0, 512) == 0 && gm_round_up(1, 512) == 512 && gm_round_up(512, 512) == 512);
    CHECK(gm_dtype_bytes(GM_F32) == 4 && gm_dtype_bytes(GM_BF16) == 2 &&
          gm_dtype_bytes(GM_F16) == 2);
    puts("test_base: ok");
    return 0;
}
