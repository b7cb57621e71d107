/* comm.c - what every communicator does alike: arguments, the first failure, a collective in words,
 * the last ones.
 *
 * 1. `failed` is set once, behind the complete text: whoever sees it may read the text without a
 *    lock.
 * 2. A call that is refused for its arguments is not counted and leaves the communicator as it was.
 * 3. `hash` is a chain over everything that must be the same on all ranks, of all collectives that
 *    were counted: two ranks with the same number and hash have issued the same ones (but for one
 *    chance in 2^64). */
#include "comm/comm_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const kind_names[] = {"all_gather", "reduce_scatter", "all_reduce"};
static const char *const dtype_names[] = {"fp32", "bf16", "fp16", "u64"};

int gm_comm_rank(const gm_comm *comm)
{
    return comm->rank;
}

int gm_comm_size(const gm_comm *comm)
{
    return comm->size;
}

gm_status gm_comm_new(const gm_comm_ops *ops, size_t bytes, int rank, int size, gm_comm **out)
{
    gm_comm *comm;
    *out = NULL;
    GM_FAIL_IF(size < 1 || rank < 0 || rank >= size, GM_ERR_ARG,
               "rank %d of %d: a rank from 0 to size - 1 is wanted", rank, size);
    GM_TRY(gm_new(&comm, bytes, "HOST: no %zu bytes for a communicator"));
    comm->ops = ops;
    comm->rank = rank;
    comm->size = comm->n_named = size;
    comm->owner = getpid();
    atomic_init(&comm->failed, GM_OK);
    pthread_mutex_init(&comm->lock, NULL);
    pthread_mutex_init(&comm->record, NULL);
    *out = comm;
    return GM_OK;
}

static void drop_context(gm_comm *comm)
{
    if (comm->drop_context) {
        comm->drop_context(comm->namer_context);
    }
}

void gm_comm_release(gm_comm *comm)
{
    drop_context(comm);
    pthread_mutex_destroy(&comm->lock);
    pthread_mutex_destroy(&comm->record);
    free(comm->names);
    free(comm);
}

gm_status gm_comm_name_ranks(gm_comm *comm, const int *names, int n)
{
    size_t bytes = (size_t)comm->size * sizeof *names;
    int *copy = malloc(bytes);
    GM_FAIL_IF(!copy, GM_ERR_NOMEM, "HOST: no %zu bytes for the names of ranks", bytes);
    memcpy(copy, names, bytes);
    free(comm->names);
    comm->names = copy;
    comm->n_named = n;
    return GM_OK;
}

int gm_comm_rank_name(const gm_comm *comm, int r)
{
    return comm->names && r >= 0 && r < comm->size ? comm->names[r] : r;
}

/* ---- words ---- */

static size_t dtype_bytes(gm_comm_dtype dtype)
{
    switch (dtype) {
    case GM_COMM_F32: return 4;
    case GM_COMM_BF16:
    case GM_COMM_F16: return 2;
    case GM_COMM_U64: break;
    }
    return 8;
}

size_t gm_comm_element_bytes(const gm_comm_call *call)
{
    return call->is_bytes ? 1 : dtype_bytes(call->dtype);
}

static bool has_shards(const gm_comm_call *call)
{
    return call->kind == GM_COMM_ALL_GATHER || call->kind == GM_COMM_REDUCE_SCATTER;
}

size_t gm_comm_call_bytes(const gm_comm *comm, const gm_comm_call *call)
{
    size_t bytes = call->count * gm_comm_element_bytes(call);
    return has_shards(call) ? bytes * (size_t)comm->size : bytes;
}

/* The lock of the records is held. */
static void describe(gm_comm *comm, const gm_comm_call *call, char out[GM_COMM_WORDS])
{
    char shards[16] = "", what[40] = "", label[224] = "", about[272] = "";
    if (has_shards(call)) {
        (void)snprintf(shards, sizeof shards, "%d x ", comm->size);
    }
    if (!call->is_bytes) {
        (void)snprintf(what, sizeof what, "%s of %s", call->op == GM_COMM_MAX ? "max" : "sum",
                       dtype_names[call->dtype]);
    }
    if (call->label && comm->namer) {
        comm->namer(comm->namer_context, call->label, label, sizeof label);
    }
    if (call->label && !*label) {
        (void)snprintf(label, sizeof label, "label %llu", (unsigned long long)call->label);
    }
    if (*what || *label) {
        (void)snprintf(about, sizeof about, " (%s%s%s)", what, *what && *label ? "; " : "", label);
    }
    (void)snprintf(out, GM_COMM_WORDS, "%s number %llu of %s%zu bytes%s", kind_names[call->kind],
                   (unsigned long long)call->number, shards,
                   call->count * gm_comm_element_bytes(call), about);
}

void gm_comm_describe(gm_comm *comm, const gm_comm_call *call, char out[GM_COMM_WORDS])
{
    pthread_mutex_lock(&comm->record);
    describe(comm, call, out);
    pthread_mutex_unlock(&comm->record);
}

void gm_comm_label(gm_comm *comm, uint64_t label)
{
    comm->label = label;
}

void gm_comm_set_namer(gm_comm *comm, gm_comm_namer namer, void *context,
                       void (*drop)(void *context))
{
    if (comm->owner == getpid()) { /* a forked child may have inherited a lock that nobody holds */
        pthread_mutex_lock(&comm->record);
        drop_context(comm);
        comm->namer = namer;
        comm->namer_context = context;
        comm->drop_context = drop;
        pthread_mutex_unlock(&comm->record);
    } else if (drop) {
        drop(context);
    }
}

/* ---- the last collectives ---- */

static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0x9e3779b97f4a7c15; /* odd: no two hashes become one */
    hash ^= hash >> 32;
    hash *= 0xd6e8feb86659fd93;
    return hash ^ hash >> 32;
}

/* Gives the collective its number. */
static void count(gm_comm *comm, gm_comm_call *call)
{
    uint64_t shape = (uint64_t)call->kind | (uint64_t)call->is_bytes << 8 |
                     (uint64_t)call->dtype << 16 | (uint64_t)call->op << 24;
    call->label = comm->label;
    pthread_mutex_lock(&comm->record);
    call->number = ++comm->n_calls;
    call->hash = comm->hash;
    comm->hash = mix(mix(mix(comm->hash, shape), call->count), call->label);
    comm->records[call->number % GM_COMM_N_RECORDS] = *call;
    pthread_mutex_unlock(&comm->record);
}

void gm_comm_calls(gm_comm *comm, uint64_t *out_number, uint64_t *out_hash)
{
    *out_number = *out_hash = 0;
    if (comm->owner == getpid()) { /* a forked child may have a lock that no thread holds */
        pthread_mutex_lock(&comm->record);
        *out_number = comm->n_calls;
        *out_hash = comm->hash;
        pthread_mutex_unlock(&comm->record);
    }
}

bool gm_comm_recall(gm_comm *comm, uint64_t number, char out[GM_COMM_WORDS])
{
    bool is_there = false;
    if (number > 0 && comm->owner == getpid()) {
        pthread_mutex_lock(&comm->record);
        const gm_comm_call *call = &comm->records[number % GM_COMM_N_RECORDS];
        is_there = call->number == number;
        if (is_there) {
            describe(comm, call, out);
        }
        pthread_mutex_unlock(&comm->record);
    }
    return is_there;
}

/* ---- the first failure ---- */

bool gm_comm_has_failed(gm_comm *comm)
{
    return atomic_load_explicit(&comm->failed, memory_order_acquire) != GM_OK;
}

gm_status gm_comm_failure(gm_comm *comm)
{
    gm_status status = (gm_status)atomic_load_explicit(&comm->failed, memory_order_acquire);
    GM_ASSERT(status != GM_OK);
    return GM_FAIL(status, "%s", comm->failure);
}

gm_status gm_comm_break(gm_comm *comm, const gm_comm_call *call, gm_status status,
                        const char *format, ...)
{
    char words[GM_COMM_WORDS] = "", text[sizeof comm->failure - GM_COMM_WORDS - 40];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (call) {
        gm_comm_describe(comm, call, words);
    }
    pthread_mutex_lock(&comm->lock);
    if (!gm_comm_has_failed(comm)) {
        (void)snprintf(comm->failure, sizeof comm->failure, "%s%srank %d of %d: %s", words,
                       call ? ", " : "", gm_comm_rank_name(comm, comm->rank), comm->n_named, text);
        comm->failed_at = call ? call->number : 0;
        atomic_store_explicit(&comm->failed, status, memory_order_release);
    }
    pthread_mutex_unlock(&comm->lock);
    if (comm->ops->end) {
        comm->ops->end(comm);
    }
    return gm_comm_failure(comm);
}

uint64_t gm_comm_failed_at(gm_comm *comm)
{
    return gm_comm_has_failed(comm) ? comm->failed_at : 0;
}

static gm_status check_owner(const gm_comm *comm)
{
    GM_FAIL_IF(comm->owner != getpid(), GM_ERR_STATE,
               "rank %d of %d: this process was forked from the one that has the "
               "communicator, and cannot use it",
               comm->rank, comm->size);
    return GM_OK;
}

gm_status gm_comm_check(gm_comm *comm)
{
    GM_TRY(check_owner(comm));
    if (comm->ops->check && !gm_comm_has_failed(comm)) {
        (void)comm->ops->check(comm);
    }
    return gm_comm_has_failed(comm) ? gm_comm_failure(comm) : GM_OK;
}

void gm_comm_abort(gm_comm *comm, const char *reason)
{
    if (comm && check_owner(comm) == GM_OK) {
        (void)gm_comm_break(comm, NULL, GM_ERR_STATE, "%s", reason);
    }
}

bool gm_comm_is_over(gm_comm *comm)
{
    return comm->owner != getpid() || !comm->ops->check || gm_comm_has_failed(comm) ||
           !comm->ops->check(comm) || gm_comm_has_failed(comm);
}

void gm_comm_free(gm_comm *comm)
{
    if (comm && comm->owner == getpid()) { /* in a forked child everything stays the parent's */
        comm->ops->free(comm);
    }
}

gm_status gm_comm_attach(gm_comm *comm, gm_device *dev)
{
    GM_TRY(check_owner(comm));
    return comm->ops->attach(comm, dev);
}

/* ---- collectives ---- */

static gm_status refuse(const gm_comm *comm, const gm_comm_call *call, const char *why)
{
    return GM_FAIL(GM_ERR_ARG, "%s, rank %d of %d: %s", kind_names[call->kind], comm->rank,
                   comm->size, why);
}

static gm_status issue(gm_comm *comm, gm_comm_call *call, gm_stream stream)
{
    size_t element = gm_comm_element_bytes(call);
    if (call->count > (SIZE_MAX - call->base) / element / (size_t)comm->size) {
        return refuse(comm, call, "the range is longer than the address space");
    }
    if (call->count > 0 && (call->base == 0 || call->base % element != 0)) {
        return refuse(comm, call, "the address is NULL or not a multiple of the element's size");
    }
    GM_TRY(check_owner(comm));
    if (gm_comm_has_failed(comm)) {
        return gm_comm_failure(comm);
    }
    count(comm, call);
    if (comm->size == 1 || !comm->ops->issue || call->count == 0) {
        return GM_OK;
    }
    return comm->ops->issue(comm, call, stream);
}

gm_status gm_comm_all_gather(gm_comm *comm, uintptr_t base, size_t shard_bytes, gm_stream stream)
{
    gm_comm_call call = {
        .kind = GM_COMM_ALL_GATHER, .base = base, .count = shard_bytes, .is_bytes = true};
    return issue(comm, &call, stream);
}

gm_status gm_comm_reduce_scatter(gm_comm *comm, uintptr_t base, size_t shard_count,
                                 gm_comm_dtype dtype, gm_stream stream)
{
    gm_comm_call call = {
        .kind = GM_COMM_REDUCE_SCATTER, .base = base, .count = shard_count, .dtype = dtype};
    if (dtype != GM_COMM_F32 && dtype != GM_COMM_BF16 && dtype != GM_COMM_F16) {
        return refuse(comm, &call, "the dtype must be fp32, bf16 or fp16");
    }
    return issue(comm, &call, stream);
}

gm_status gm_comm_all_reduce(gm_comm *comm, uintptr_t data, size_t count, gm_comm_dtype dtype,
                             gm_comm_op op, gm_stream stream)
{
    gm_comm_call call = {
        .kind = GM_COMM_ALL_REDUCE, .base = data, .count = count, .dtype = dtype, .op = op};
    if ((unsigned)dtype > GM_COMM_U64) {
        return refuse(comm, &call, "the dtype must be fp32, bf16, fp16 or u64");
    }
    if (op != GM_COMM_SUM && (op != GM_COMM_MAX || dtype != GM_COMM_U64)) {
        return refuse(comm, &call, "the operation must be sum, or max of u64");
    }
    return issue(comm, &call, stream);
}
