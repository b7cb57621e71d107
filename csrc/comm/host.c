/* host.c - collectives between ranks whose device is the host: bytes travel through the creator's
 * transport, sums are taken here.
 *
 * 1. A sum is taken in the order of the ranks, for each element on one rank only: 16-bit types and
 *    fp32 in fp32, rounded once at the end, by the arithmetic that adds gradients (grad.c).  The
 *    bits are the same on every rank and in every run, and a NaN is canonical.
 * 2. Before the bytes of a collective, the ranks tell each other which one they are at, what it is
 *    for, and the hash of all before.  Every rank sees the headers of all, so either none or all
 *    find a difference; then each tells the others its words, all fail, by name, and no byte of the
 *    range has changed.
 * 3. On a device whose streams run late, each collective waits for the one before (an event), so
 *    that all ranks run them in the order in which they were issued.  They run inside calls of the
 *    device, which is where such a device runs everything; a rank that waits there waits for other
 *    processes, never for this one.
 * 4. Memory beside the ranges is bounded by SLICE elements a rank, whatever the size of a
 *    collective. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arith/adam_impl.h"
#include "arith/arith.h"
#include "comm/comm_impl.h"

#define SLICE ((size_t)1 << 20)

typedef struct host_comm {
    gm_comm base; /* first: a gm_comm * is a host_comm * */
    gm_comm_transport transport;
    gm_device *dev; /* NULL: collectives run at once */
    gm_event last;  /* behind the latest collective on dev; 0 before the first */
} host_comm;

/* What the ranks tell each other: everything that must agree. */
typedef struct header {
    uint64_t number, count;
    uint32_t kind, is_bytes, dtype, op;
    uint64_t label, hash;
} header;

typedef struct job {
    host_comm *comm;
    gm_comm_call call;
    gm_comm_piece *out, *in; /* (size,) each, in one allocation with the job */
} job;

static host_comm *as_host(gm_comm *comm)
{
    return (host_comm *)comm;
}

/* ---- one exchange ---- */

static gm_status exchange(job *j)
{
    host_comm *c = j->comm;
    char why[400] = "";
    j->out[c->base.rank].bytes = 0;
    j->in[c->base.rank].bytes = 0;
    if (!c->transport.exchange(c->transport.context, j->out, j->in, why, sizeof why)) {
        return gm_comm_break(&c->base, &j->call, GM_ERR_DEVICE, "%s", why);
    }
    return GM_OK;
}

typedef struct words {
    char text[GM_COMM_WORDS];
} words;

/* What the ranks are at, in the words of each: labels mean what that rank's namer says.  Where one
 * is already gone, in our own words. */
static void tell_words(job *j, const header *headers, words *all)
{
    host_comm *c = j->comm;
    size_t size = (size_t)c->base.size, rank = (size_t)c->base.rank;
    char why[400];
    words mine = {""};
    gm_comm_describe(&c->base, &j->call, mine.text);
    for (size_t r = 0; r < size; r++) {
        j->out[r] = (gm_comm_piece){&mine, sizeof mine};
        j->in[r] = (gm_comm_piece){&all[r], sizeof all[r]};
    }
    j->out[rank].bytes = j->in[rank].bytes = 0;
    bool is_told = c->transport.exchange(c->transport.context, j->out, j->in, why, sizeof why);
    for (size_t r = 0; r < size; r++) {
        const header *h = &headers[r];
        gm_comm_call call = {.number = h->number,
                             .kind = (gm_comm_kind)(h->kind % GM_COMM_N_KINDS),
                             .count = (size_t)h->count,
                             .is_bytes = h->is_bytes,
                             .dtype = (gm_comm_dtype)(h->dtype % (GM_COMM_U64 + 1)),
                             .op = (gm_comm_op)(h->op % (GM_COMM_MAX + 1)),
                             .label = h->label};
        if (!is_told || r == rank) {
            gm_comm_describe(&c->base, &call, all[r].text);
        }
        all[r].text[GM_COMM_WORDS - 1] = 0;
    }
}

/* "ranks 1, 3 are at A; rank 2 is at B; ", of the ranks whose words are not ours. */
static void list_others(const gm_comm *comm, const words *all, char *out, size_t bytes)
{
    size_t at = 0, size = (size_t)comm->size, rank = (size_t)comm->rank;
    out[0] = 0;
    for (size_t r = 0; r < size && at < bytes; r++) {
        size_t n = 0, first = 0;
        while (strcmp(all[first].text, all[r].text) != 0) {
            first++;
        }
        if (first < r || strcmp(all[r].text, all[rank].text) == 0) {
            continue; /* has been said, or is ours */
        }
        for (size_t other = r; other < size; other++) {
            n += strcmp(all[other].text, all[r].text) == 0;
        }
        const char *between = n > 1 ? "ranks " : "rank ";
        for (size_t other = r; other < size && at < bytes; other++) {
            if (strcmp(all[other].text, all[r].text) == 0) {
                at += (size_t)snprintf(out + at, bytes - at, "%s%d", between,
                                       gm_comm_rank_name(comm, (int)other));
                between = ", ";
            }
        }
        if (at < bytes) {
            at += (size_t)snprintf(out + at, bytes - at, " %s at %s; ", n > 1 ? "are" : "is",
                                   all[r].text);
        }
    }
}

static gm_status differ(job *j, const header *headers)
{
    host_comm *c = j->comm;
    size_t size = (size_t)c->base.size;
    char others[560];
    words *all = calloc(size, sizeof *all);
    if (!all) {
        return gm_comm_break(&c->base, &j->call, GM_ERR_NOMEM,
                             "HOST: no %zu bytes to say how the ranks differ", size * sizeof *all);
    }
    tell_words(j, headers, all);
    list_others(&c->base, all, others, sizeof others);
    free(all);
    return gm_comm_break(&c->base, &j->call, GM_ERR_STATE,
                         "%sall ranks must issue the same collectives in the same order",
                         *others ? others
                                 : "what the ranks have issued before it (of 0 bytes) differs; ");
}

static gm_status compare(job *j)
{
    host_comm *c = j->comm;
    const gm_comm_call *call = &j->call;
    size_t size = (size_t)c->base.size;
    header mine = {.number = call->number,
                   .count = call->count,
                   .kind = (uint32_t)call->kind,
                   .is_bytes = call->is_bytes,
                   .dtype = (uint32_t)call->dtype,
                   .op = (uint32_t)call->op,
                   .label = call->label,
                   .hash = call->hash};
    header *theirs = calloc(size, sizeof *theirs);
    if (!theirs) {
        return gm_comm_break(&c->base, call, GM_ERR_NOMEM, "HOST: no %zu bytes for headers",
                             size * sizeof *theirs);
    }
    for (size_t r = 0; r < size; r++) {
        j->out[r] = (gm_comm_piece){&mine, sizeof mine};
        j->in[r] = (gm_comm_piece){&theirs[r], sizeof mine};
    }
    gm_status status = exchange(j);
    theirs[c->base.rank] = mine;
    for (size_t r = 0; r < size && status == GM_OK; r++) {
        if (memcmp(&theirs[r], &mine, sizeof mine) != 0) {
            status = differ(j, theirs);
        }
    }
    free(theirs);
    return status;
}

/* ---- sums ---- */

static void add_u64(uint64_t *sum, const uint64_t *term, size_t n, gm_comm_op op)
{
    for (size_t i = 0; i < n; i++) {
        sum[i] = op == GM_COMM_SUM ? sum[i] + term[i] : sum[i] > term[i] ? sum[i] : term[i];
    }
}

/* sum = term for the first rank, sum += term for the others; n elements. */
static void take(const gm_comm_call *call, void *sum, const void *term, size_t n, bool is_first)
{
    if (call->dtype != GM_COMM_U64) {
        gm_grad_add_args add = {.dst = sum,
                                .dst_dtype = GM_F32,
                                .src = term,
                                .src_dtype = (gm_dtype)call->dtype,
                                .numel = n,
                                .accumulate = !is_first};
        gm_grad_add_host(&add, NULL);
    } else if (is_first) {
        memcpy(sum, term, n * 8);
    } else {
        add_u64(sum, term, n, call->op);
    }
}

static void put(const gm_comm_call *call, void *dst, const void *sum, size_t n)
{
    if (call->dtype == GM_COMM_U64) {
        memcpy(dst, sum, n * 8);
        return;
    }
    gm_grad_add_args store = {.dst = dst,
                              .dst_dtype = (gm_dtype)call->dtype,
                              .src = sum,
                              .src_dtype = GM_F32,
                              .numel = n};
    gm_grad_add_host(&store, NULL);
}

/* ---- ranges of the ranks ---- */

/* Rank r has the elements [r * share, (r + 1) * share) of `total`; the last ones may have fewer, or
 * none. */
typedef struct shares {
    size_t share, total;
} shares;

typedef struct span {
    size_t begin, n;
} span;

/* Of rank r's elements those from `from` on, at most SLICE (or all, where is_whole). */
static span part_of(shares s, size_t r, size_t from, bool is_whole)
{
    size_t begin = r * s.share < s.total ? r * s.share : s.total;
    size_t n = s.total - begin < s.share ? s.total - begin : s.share;
    from = from < n ? from : n;
    n -= from;
    return (span){begin + from, is_whole || n < SLICE ? n : SLICE};
}

static gm_comm_piece piece_at(const gm_comm_call *call, span s)
{
    size_t element = gm_comm_element_bytes(call);
    return (gm_comm_piece){(void *)(call->base + s.begin * element), s.n * element};
}

static gm_status gather(job *j, shares s)
{
    size_t rank = (size_t)j->comm->base.rank;
    for (size_t r = 0; r < (size_t)j->comm->base.size; r++) {
        j->out[r] = piece_at(&j->call, part_of(s, rank, 0, true));
        j->in[r] = piece_at(&j->call, part_of(s, r, 0, true));
    }
    return exchange(j);
}

/* Leaves the sums of the own elements in place. */
static gm_status reduce(job *j, shares s)
{
    const gm_comm_call *call = &j->call;
    size_t size = (size_t)j->comm->base.size, rank = (size_t)j->comm->base.rank;
    size_t slice = s.share < SLICE ? s.share : SLICE, element = gm_comm_element_bytes(call);
    char *terms = malloc(size * slice * element);
    void *sum = malloc(slice * 8);
    gm_status status = GM_OK;
    if (!terms || !sum) {
        status =
            gm_comm_break(&j->comm->base, call, GM_ERR_NOMEM,
                          "HOST: no %zu bytes for a sum over the ranks", size * slice * element);
    }
    for (size_t from = 0; from < s.share && status == GM_OK; from += SLICE) {
        span own = part_of(s, rank, from, false);
        for (size_t r = 0; r < size; r++) {
            j->out[r] = piece_at(call, part_of(s, r, from, false));
            j->in[r] = (gm_comm_piece){terms + r * slice * element, own.n * element};
        }
        status = exchange(j);
        for (size_t r = 0; r < size && status == GM_OK; r++) {
            const void *term = r == rank ? piece_at(call, own).data : terms + r * slice * element;
            take(call, sum, term, own.n, r == 0);
        }
        if (status == GM_OK) {
            put(call, piece_at(call, own).data, sum, own.n);
        }
    }
    free(terms);
    free(sum);
    return status;
}

static gm_status perform(job *j)
{
    size_t size = (size_t)j->comm->base.size, count = j->call.count;
    shares shards = {count, count * size};
    shares even = {count / size + (count % size != 0), count};
    GM_TRY(compare(j));
    switch (j->call.kind) {
    case GM_COMM_ALL_GATHER: return gather(j, shards);
    case GM_COMM_REDUCE_SCATTER: return reduce(j, shards);
    case GM_COMM_ALL_REDUCE: GM_TRY(reduce(j, even)); return gather(j, even);
    case GM_COMM_N_KINDS: break;
    }
    return GM_OK;
}

/* ---- the stream ---- */

static void run(void *context)
{
    job *j = context;
    if (!gm_comm_has_failed(&j->comm->base)) {
        (void)perform(j); /* a failure is recorded */
    }
    free(j);
}

/* The collective's place in the stream: behind the one before, in front of the next. */
static gm_status put_on_stream(host_comm *c, job *j, gm_stream stream)
{
    const gm_device_ops *ops = c->dev->ops;
    const gm_comm_call *call = &j->call;
    gm_status status = GM_OK;
    if (c->last == 0) {
        GM_TRY_GOTO(status, fail, ops->event_new(c->dev, false, &c->last));
    } else {
        GM_TRY_GOTO(status, fail, ops->event_wait(c->dev, c->last, stream));
    }
    if (call->count > 0) {
        gm_note_access(c->dev, (const void *)call->base, gm_comm_call_bytes(&c->base, call), true,
                       stream);
    }
    GM_TRY_GOTO(status, fail, ops->host_call(c->dev, run, j, stream));
    return ops->event_record(c->dev, c->last, stream);
fail:
    free(j);
    return status;
}

static gm_status host_issue(gm_comm *comm, const gm_comm_call *call, gm_stream stream)
{
    host_comm *c = as_host(comm);
    size_t size = (size_t)comm->size;
    job *j = calloc(1, sizeof *j + 2 * size * sizeof *j->out);
    if (!j) {
        return gm_comm_break(comm, call, GM_ERR_NOMEM, "HOST: no %zu bytes for a collective",
                             sizeof *j + 2 * size * sizeof *j->out);
    }
    j->comm = c;
    j->call = *call;
    j->out = (gm_comm_piece *)(j + 1);
    j->in = j->out + size;
    if (!c->dev) {
        run(j);
    } else {
        gm_status status = put_on_stream(c, j, stream);
        if (status != GM_OK) { /* the other ranks will wait for this one in vain */
            return gm_comm_break(comm, call, status, "%s", gm_last_error());
        }
    }
    return gm_comm_has_failed(comm) ? gm_comm_failure(comm) : GM_OK;
}

static gm_status host_attach(gm_comm *comm, gm_device *dev)
{
    host_comm *c = as_host(comm);
    GM_FAIL_IF(dev && !dev->is_host, GM_ERR_ARG,
               "rank %d of %d: this communicator is for the host device, not %s", comm->rank,
               comm->size, dev->ops->name);
    if (c->dev && c->last != 0) {
        gm_status status = c->dev->ops->event_sync(c->dev, c->last);
        gm_free_event(c->dev, &c->last);
        c->dev = NULL;
        GM_TRY(status);
    }
    c->dev = dev;
    return GM_OK;
}

static void host_end(gm_comm *comm)
{
    host_comm *c = as_host(comm);
    c->transport.close(c->transport.context);
}

static void host_free(gm_comm *comm)
{
    host_comm *c = as_host(comm);
    (void)host_attach(comm, NULL); /* runs what is queued: it would find no communicator */
    c->transport.close(c->transport.context);
    c->transport.free(c->transport.context);
    gm_comm_release(comm);
}

static const gm_comm_ops host_ops = {
    .name = "host",
    .issue = host_issue,
    .attach = host_attach,
    .end = host_end,
    .free = host_free,
};

gm_status gm_comm_host_new(const gm_comm_transport *transport, int rank, int size, gm_comm **out)
{
    GM_TRY_ELSE(gm_comm_new(&host_ops, sizeof(host_comm), rank, size, out),
                transport->free(transport->context));
    as_host(*out)->transport = *transport;
    return GM_OK;
}
