/* counts.h - what the engine counts, each of them once: its type, its name here and in Python, and
 * what view.c has for it. Seconds are apart: they are no whole numbers. */
#pragma once

#define GM_ENGINE_COUNTS(X)                                                                       \
    X(uint64_t, fetches, table.fetches)                                                           \
    X(uint64_t, evictions, table.evictions)                                                       \
    X(uint64_t, fetched_bytes, table.fetched_bytes)                                               \
    X(uint64_t, evicted_bytes, table.evicted_bytes)                                               \
    X(size_t, device_bytes, table.device_bytes)                                                   \
    X(size_t, device_peak_bytes, table.device_peak_bytes)                                         \
    X(size_t, device_budget_bytes, engine->room.budget) /* SIZE_MAX: none, in Python -1 */        \
    /* the arena, and spares */                                                                   \
    X(size_t, host_bytes, gm_arena_bytes(engine->arena) + engine->speculation.bytes)              \
    /* weights + optimizer states + gradients of all chunks, as blocks; of them, weights */       \
    X(size_t, state_bytes, state_bytes)                                                           \
    X(size_t, weight_bytes, weight_bytes)                                                         \
    /* of these chunks on the device, without homes */                                            \
    X(size_t, staying_bytes, engine->stay.bytes)                                                  \
    X(uint32_t, chunks, gm_layout_n_chunks(engine->layout))                                       \
    X(uint32_t, blocks, table.n_blocks)                                                           \
    X(uint32_t, chunks_with_states, n_with_states)                                                \
    X(uint32_t, leases, n_leases)                                                                 \
    X(uint64_t, layout_hash, gm_layout_hash(engine->layout))                                      \
    X(uint64_t, plans, engine->room.n_plans)        /* adopted */                                 \
    X(uint64_t, plan_breaks, engine->room.n_breaks) /* left, for memory or a pass not planned */  \
    X(uint64_t, deviations, engine->pass.n_deviations)     /* passes that left their trace */     \
    X(uint64_t, host_waits, gm_engine_count_waits(engine)) /* and mappings, wherever */           \
    X(uint64_t, replay_waits, engine->pass.n_replay_waits) /* in calls that follow a plan: 0 */   \
    X(uint32_t, traces, gm_book_n_traces(engine->pass.book))                                      \
    X(uint32_t, pending_updates, engine->update.n_pending)                                        \
    X(uint64_t, immediate_updates, n_immediate)                 /* of chunks inside a backward */ \
    X(uint64_t, speculated_updates, engine->speculation.n_made) /* begun before their step */     \
    X(uint64_t, taken_updates, engine->speculation.n_taken - n_late)   /* what the step was */    \
    X(uint64_t, redone_updates, engine->speculation.n_redone + n_late) /* what it was not */      \
    X(size_t, spare_bytes, engine->speculation.bytes) /* of host_bytes, for these */              \
    /* to find those that have ended: no call may look at all of them */                          \
    X(uint64_t, leases_walked, engine->watch.n_walked)                                            \
    /* of others of this process, as plans expect it, with the slack */                           \
    X(size_t, outside_peak_bytes, engine->inputs.outside_peak_bytes)                              \
    X(bool, planned, engine->room.plan != NULL)                                                   \
    /* there is no plan, one is due, or the first passes that correct the rates are not over */   \
    X(bool, settling, gm_planner_is_settling(engine))                                             \
    X(uint32_t, rank, engine->ranks.rank)                                                         \
    X(uint32_t, shards, engine->ranks.n_shards)                                                   \
    X(uint32_t, replicas, engine->ranks.n_replicas)                                               \
    X(uint64_t, gathers, engine->weights.n_gathers) /* collectives on chunks */                   \
    X(uint64_t, reduces, engine->gradient.n_reduces)                                              \
    X(uint64_t, gathered_bytes, engine->weights.gathered_bytes) /* of whole chunks */             \
    X(uint64_t, reduced_bytes, engine->gradient.reduced_bytes)

#define GM_ENGINE_SECONDS(X)                                                          \
    /* of updates on the host, so far */                                              \
    X(double, host_adam_seconds, (double)atomic_load(&engine->update.host_ns) * 1e-9) \
    /* that taking and pinning host_bytes took */                                     \
    X(double, host_pin_seconds,                                                       \
      engine->arena_seconds + table.home_seconds + engine->speculation.seconds)       \
    /* of the host, for device memory: making, mapping, giving back */                \
    X(double, mapping_seconds, table.mapping_seconds)                                 \
    /* of the plan's step, for the device alone; 0: there is no plan */               \
    X(double, planned_compute_seconds,                                                \
      engine->room.plan ? gm_plan_get_info(engine->room.plan)->compute_seconds : 0)
