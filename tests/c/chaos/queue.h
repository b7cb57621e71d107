/* queue.h - the operations of the chaos device, and the queues in which they wait to be run. */
#pragma once

#include "device/device.h"
#include "chaos/order.h"

typedef struct gm_chaos_device gm_chaos_device;

/* Queues by number; a queue is an actor of order.h. */
enum {
    GM_CHAOS_HOST,     /* the callers: a clock, no operations */
    GM_CHAOS_COMPUTE,  /* stream 0: a clock, no operations */
    GM_CHAOS_RELEASED, /* host calls that a seeded fault has let go */
    GM_CHAOS_FIRST_STREAM,
    GM_CHAOS_N_QUEUES = GM_ORDER_MAX_ACTORS
};

/* One record of an event: waits refer to it, whatever the event is recorded for later. */
typedef struct gm_chaos_mark {
    uint32_t references;
    uint32_t queue; /* that it was recorded on */
    bool is_reached;
    double seconds; /* by the device's own clock, when issued */
    gm_clock clock;
} gm_chaos_mark;

/* Bytes that an operation uses; a write may read them too. */
typedef struct gm_chaos_use {
    uintptr_t address;
    size_t bytes;
    bool is_write;
} gm_chaos_use;

typedef enum gm_chaos_kind {
    GM_CHAOS_COPY_H2D,
    GM_CHAOS_COPY_D2H,
    GM_CHAOS_COPY_D2D,
    GM_CHAOS_FILL,
    GM_CHAOS_ADAM,
    GM_CHAOS_GRAD_ADD,
    GM_CHAOS_SUMSQ,
    GM_CHAOS_CLIP,
    GM_CHAOS_HOST_CALL,
    GM_CHAOS_FOREIGN, /* work of others on stream 0, done by them */
    GM_CHAOS_RECORD,  /* from here on: no bytes are used */
    GM_CHAOS_WAIT,
    GM_CHAOS_N_KINDS
} gm_chaos_kind;

typedef struct gm_chaos_op {
    struct gm_chaos_op *next;
    gm_chaos_kind kind;
    uint64_t number;       /* in the order of issue, from 1 */
    bool is_dropped;       /* the seeded faults */
    bool is_twice;         /* of GM_CHAOS_ADAM */
    bool is_early;         /* of GM_CHAOS_HOST_CALL */
    bool is_released;      /* of GM_CHAOS_HOST_CALL */
    bool has_foreign_host; /* a copy from or to host memory that is not pinned */
    uintptr_t dst, src;
    size_t bytes, numel;
    uint8_t byte;
    gm_dtype dtype;
    gm_sumsq *sum;
    gm_adam_args adam;
    gm_adam_range *ranges; /* owned: a copy of the caller's */
    gm_grad_add_args grad_add;
    gm_clip_args clip;
    void (*fn)(void *context);
    void *context;
    gm_chaos_mark *mark; /* owned reference, of GM_CHAOS_RECORD and GM_CHAOS_WAIT */
    gm_chaos_use *uses;  /* (n_uses,) owned */
    size_t n_uses, use_capacity;
} gm_chaos_op;

typedef struct gm_chaos_queue {
    gm_stream stream;
    bool is_used;
    gm_chaos_op *first, *last;
    uint32_t speed; /* how likely it is to be chosen */
    gm_clock clock; /* what happens before the next operation here, beside what the host knows */
    gm_clock before_last; /* the same, as it was at the last operation */
    bool has_unrecorded;  /* an operation was issued since the last record */
    gm_chaos_op *held;    /* by GM_CHAOS_SWAP */
    gm_chaos_op *noted;   /* collects the uses of the next host call; NULL: none */
} gm_chaos_queue;

/* The queue of a stream; GM_ERR_ARG for what is not a stream. */
gm_status gm_chaos_find_queue(gm_chaos_device *dev, gm_stream stream, gm_chaos_queue **out);
uint32_t gm_chaos_number(const gm_chaos_device *dev, const gm_chaos_queue *queue);
gm_clock *gm_chaos_host_clock(gm_chaos_device *dev);

gm_status gm_chaos_op_new(gm_chaos_device *dev, gm_chaos_kind kind, gm_chaos_op **out);
void gm_chaos_op_free(gm_chaos_op *op); /* NULL is fine */
gm_status gm_chaos_add_use(gm_chaos_op *op, const void *address, size_t bytes, bool is_write);
gm_status gm_chaos_mark_new(uint32_t queue, const gm_clock *clock, gm_chaos_mark **out);
void gm_chaos_mark_unref(gm_chaos_mark *mark); /* NULL is fine */
void gm_chaos_append(gm_chaos_device *dev, gm_chaos_queue *queue, gm_chaos_op *op);
/* The record goes in front of the last operation that has not run. */
void gm_chaos_insert_early(gm_chaos_device *dev, gm_chaos_queue *queue, gm_chaos_op *record);
/* The first failure is what every later wait of the host gives. */
void gm_chaos_keep_failure(gm_chaos_device *dev, gm_status status);
void gm_chaos_run(gm_chaos_device *dev, gm_chaos_op *op); /* frees it */
bool gm_chaos_draw(gm_chaos_device *dev, uint64_t n);     /* one in n is true */
void gm_chaos_wander(gm_chaos_device *dev);               /* runs some ready work, often none */
void gm_chaos_run_until(gm_chaos_device *dev, const gm_chaos_mark *mark);
void gm_chaos_run_queue(gm_chaos_device *dev, gm_chaos_queue *queue); /* until it is empty */
void gm_chaos_run_all(gm_chaos_device *dev);
void gm_chaos_drop_queue(gm_chaos_device *dev, gm_chaos_queue *queue); /* runs nothing */
