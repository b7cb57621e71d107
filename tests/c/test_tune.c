/* test_tune.c - the tuner on machines whose host slows down as the plan gives it more: it ends, on the best plan it saw. */
#include "plan/tune.h"

#include <math.h>

#include "check.h"

/* A machine: what its host does and how long a step takes under a plan that counted on `planned`. */
typedef struct machine {
    double (*seen)(double planned);
    double (*seconds)(double planned);
} machine;

typedef struct course {
    unsigned n_plans;
    double seconds; /* of a step in the end */
    double least;   /* of all plans that were tried */
} course;

static gm_rates start_rates(double beside)
{
    return (gm_rates){.h2d = 1, .host_adam = 1.5 * beside, .host_adam_beside = beside};
}

static course run(const machine *m, double start)
{
    gm_tuner tuner = {0};
    gm_rates rates = start_rates(start);
    course c = {.n_plans = 1, .seconds = m->seconds(start), .least = INFINITY};
    for (bool goes_on = true; goes_on && c.n_plans < 100;) {
        double planned = rates.host_adam_beside;
        c.seconds = m->seconds(planned);
        c.least = c.seconds < c.least ? c.seconds : c.least;
        CHECK(!tuner.is_done || c.n_plans > 1);
        goes_on = gm_tuner_next(&tuner, m->seen(planned), c.seconds, &rates);
        c.n_plans += goes_on;
        CHECK(rates.host_adam == rates.host_adam_beside || rates.host_adam_beside == start);
        CHECK(rates.h2d == 1);
    }
    CHECK(tuner.is_done);
    CHECK(!gm_tuner_next(&tuner, 1, 1, &rates)); /* it stays at that */
    return c;
}

static double half(double planned)
{
    (void)planned;
    return 2;
}

/* The more the plan gives it, the slower the host is. */
static double slower(double planned)
{
    return 8 / planned;
}

static double away_from_2(double planned)
{
    return 1 + fabs(planned - 2);
}

/* What the steps show makes every later plan worse. */
static double best_at_4(double planned)
{
    return 1 + fabs(planned - 4);
}

static double none(double planned)
{
    (void)planned;
    return 0;
}

static double wild(double planned)
{
    return planned > 3 ? 1 : 10;
}

static void test_courses(void)
{
    const machine steady = {half, away_from_2}, falling = {slower, away_from_2},
                  misleading = {half, best_at_4}, without = {none, away_from_2},
                  turning = {wild, best_at_4};
    course c = run(&steady, 4);
    CHECK(c.n_plans == 2 && c.seconds == 1);
    c = run(&steady, 2.1); /* within what makes no other plan */
    CHECK(c.n_plans == 1);
    c = run(&falling, 4); /* sees 2, then 4: goes on by halves */
    CHECK(c.n_plans <= GM_TUNE_WINDOWS + 1 && c.seconds <= 1.02 * c.least);
    c = run(&misleading, 4);
    CHECK(c.seconds == 1 && c.n_plans == 3); /* there, and back */
    c = run(&without, 4);
    CHECK(c.n_plans == 1);
    for (double start = 0.5; start < 20; start *= 1.1) {
        c = run(&turning, start);
        CHECK(c.n_plans <= GM_TUNE_WINDOWS + 1);
        CHECK(c.seconds <= 1.02 * c.least);
    }
}

static void test_forgetting(void)
{
    gm_tuner tuner = {0};
    gm_rates rates = start_rates(4);
    CHECK(gm_tuner_next(&tuner, 2, 5, &rates) && rates.host_adam_beside == 2);
    gm_tuner_forget(&tuner);
    CHECK(!gm_tuner_next(&tuner, 2, 9, &rates)); /* 5 s belonged to other plans */
    CHECK(rates.host_adam_beside == 2);
}

int main(void)
{
    test_courses();
    test_forgetting();
    puts("test_tune: ok");
    return 0;
}
