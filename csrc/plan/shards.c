/* shards.c - packs parameters into equal shards; see shards.h.
 *
 * Small neighbours are one block.  A run of blocks is tried with ever larger shards: those that are
 * not cut go first, the largest first, each into the first shard with room.  The others follow; one
 * that has no room in a shard lies across its end, where it may be cut there.
 *
 * A shard is then
 *
 *     | rest of one that began before | not cut | whole | padding | one that goes on |
 *
 * Runs are chosen from the first block on: best[i] is the least that blocks [0, i) take. */
#include "plan/shards.h"

#include <stdlib.h>

enum {
    MOST_BLOCKS = 256, /* of a run: bounds the time */
    SMALL = 16,        /* such a part of a shard is small */
    FINENESS = 512,    /* of sizes that are tried */
    /* A chunk that is larger than a shard of its largest asks for has to spare such a part of what
     * it is larger by. */
    LARGER = 8
};

typedef struct block {
    uint32_t first, n;    /* items */
    uint64_t numel, take; /* take: with the padding that aligns what follows */
    uint64_t step, rest;  /* cut at multiples of step, with rest behind it; step 0: not cut */
    uint64_t offset;      /* in the run's chunk */
    uint32_t shard;       /* where it begins */
} block;

typedef struct packer {
    uint64_t unit, most;
    uint32_t n_shards, n_blocks;
    block *blocks;
    block **order;         /* of a run: not cut first, the largest first */
    uint64_t *lead, *used; /* (n_shards,) of the run that is tried */
    uint64_t *sums, *best; /* (n_blocks + 1,) of what blocks before this one have, and take */
    uint32_t *from;        /* where the run that ends here begins */
} packer;

/* Where a block is cut, to have at most `room` before it; 0: nowhere. */
static uint64_t cut_of(const block *b, uint64_t room)
{
    uint64_t most = b->numel > b->rest ? b->numel - b->rest : 0;
    return b->step ? (room < most ? room : most) / b->step * b->step : 0;
}

static bool place_fixed(packer *p, block *b, uint64_t shard_numel)
{
    for (uint32_t s = 0; s < p->n_shards; s++) {
        if (p->used[s] + b->take <= shard_numel) {
            b->shard = s;
            b->offset = p->used[s]; /* behind the lead, which is not known yet */
            p->used[s] += b->take;
            return true;
        }
    }
    return false;
}

/* The block begins at the end of a shard; *shard: where it ends. */
static bool place_across(packer *p, block *b, uint64_t shard_numel, uint32_t *shard)
{
    uint64_t done = cut_of(b, shard_numel - p->used[*shard]);
    uint32_t s = *shard + 1;
    if (done == 0) {
        return false;
    }
    uint64_t first = done;
    for (; s < p->n_shards && gm_round_up(b->numel - done, p->unit) > shard_numel - p->used[s];
         s++) {
        if (p->used[s] > 0 || shard_numel % b->step || done + shard_numel + b->rest > b->numel) {
            return false;
        }
        done += shard_numel;
    }
    if (s == p->n_shards) {
        return false;
    }
    b->shard = *shard;
    b->offset = shard_numel - first;
    for (uint32_t i = *shard; i < s; i++) {
        p->used[i] = shard_numel;
    }
    p->lead[s] = gm_round_up(b->numel - done, p->unit);
    p->used[s] += p->lead[s];
    *shard = s;
    return true;
}

/* At the end of what a shard up to this one has. */
static bool place_whole(packer *p, block *b, uint64_t shard_numel, uint32_t last)
{
    for (uint32_t s = 0; s <= last; s++) {
        if (p->used[s] + b->take <= shard_numel) {
            b->shard = s;
            b->offset = p->used[s];
            p->used[s] += b->take;
            return true;
        }
    }
    return false;
}

/* Whether the n blocks of p->order fit; they have their places then. */
static bool fits(packer *p, uint32_t n, uint64_t shard_numel)
{
    uint32_t i = 0, shard = 0;
    for (uint32_t s = 0; s < p->n_shards; s++) {
        p->lead[s] = p->used[s] = 0;
    }
    for (; i < n && p->order[i]->step == 0; i++) {
        if (!place_fixed(p, p->order[i], shard_numel)) {
            return false;
        }
    }
    uint32_t n_fixed = i;
    for (; i < n; i++) {
        block *b = p->order[i];
        while (!place_whole(p, b, shard_numel, shard) && !place_across(p, b, shard_numel, &shard)) {
            if (++shard == p->n_shards) {
                return false;
            }
        }
    }
    for (i = 0; i < n; i++) {
        block *b = p->order[i];
        b->offset += b->shard * shard_numel + (i < n_fixed ? p->lead[b->shard] : 0);
    }
    return true;
}

static int compare(const void *left, const void *right)
{
    const block *a = *(block *const *)left, *b = *(block *const *)right;
    if ((a->step == 0) != (b->step == 0)) {
        return a->step == 0 ? -1 : 1;
    }
    return a->take != b->take ? (a->take > b->take ? -1 : 1) : (a->first < b->first ? -1 : 1);
}

/* The size of a shard of blocks [begin, end), below `limit` (0: none is); they have their places in
 * it. */
static uint64_t pack(packer *p, uint32_t begin, uint32_t end, uint64_t limit)
{
    uint64_t sum = p->sums[end] - p->sums[begin], low = (sum + p->n_shards - 1) / p->n_shards;
    uint64_t grain = p->unit, longest = low;
    for (uint32_t i = begin; i < end; i++) {
        block *b = &p->blocks[i];
        p->order[i - begin] = b;
        low = b->step == 0 && b->take > low ? b->take : low;
        if (b->step && b->take > longest) { /* it may have a shard of its own, between two cuts */
            longest = b->take;
            grain = b->step;
        }
    }
    qsort(p->order, end - begin, sizeof *p->order, compare);
    for (uint64_t i = 0;; i++) {
        uint64_t more = (low / FINENESS + 1) * (i * (i + 1) / 2);
        uint64_t size = (low + more + grain - 1) / grain * grain;
        if (size >= limit) {
            return 0;
        }
        if (fits(p, end - begin, size)) {
            return size;
        }
    }
}

/* The best run that ends in front of block `end`. */
static void choose(packer *p, uint32_t end)
{
    uint64_t largest = 0, overhead = p->unit * p->n_shards; /* fewer chunks, if all else is equal */
    p->best[end] = UINT64_MAX;
    for (uint32_t begin = end; begin-- > 0 && end - begin <= MOST_BLOCKS;) {
        const block *b = &p->blocks[begin];
        largest = b->step == 0 && b->take > largest ? b->take : largest;
        uint64_t sum = p->sums[end] - p->sums[begin], before = p->best[begin] + overhead;
        uint64_t usual = largest * p->n_shards > p->most ? largest * p->n_shards : p->most;
        before += sum > usual ? (sum - usual) / LARGER : 0;
        bool is_small = sum <= p->most || sum <= 2 * largest * p->n_shards || end - begin == 1;
        if (!is_small || before + sum >= p->best[end]) {
            continue;
        }
        uint64_t limit =
            p->best[end] == UINT64_MAX ? UINT64_MAX : (p->best[end] - before) / p->n_shards;
        uint64_t size = pack(p, begin, end, limit);
        if (size > 0 || sum == 0) {
            p->best[end] = before + size * p->n_shards;
            p->from[end] = begin;
        }
    }
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static void make_blocks(packer *p, const gm_shards_item *items, uint32_t n)
{
    uint64_t small = p->most / ((uint64_t)SMALL * p->n_shards);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t take = gm_round_up(items[i].numel, p->unit), cut = items[i].cut ? items[i].cut : 1;
        uint64_t step = cut / common_divisor(cut, p->unit) * p->unit;
        block *last = p->n_blocks > 0 ? &p->blocks[p->n_blocks - 1] : NULL;
        if (last && last->step == 0 && last->take + take <= small) {
            last->n++;
            last->take += take;
            continue;
        }
        block *b = &p->blocks[p->n_blocks++];
        *b = (block){.first = i, .n = 1, .numel = items[i].numel, .take = take, .rest = cut};
        b->step = take > small && step + cut <= b->numel ? step : 0;
    }
}

/* Runs are found from the last one back. */
static void tell(packer *p, const gm_shards_item *items, gm_shards_place *out)
{
    uint32_t n_runs = 0;
    for (uint32_t end = p->n_blocks; end > 0; end = p->from[end]) {
        n_runs++;
    }
    for (uint32_t end = p->n_blocks; end > 0; end = p->from[end]) {
        uint64_t size = pack(p, p->from[end], end, UINT64_MAX);
        n_runs--;
        for (uint32_t i = p->from[end]; i < end; i++) {
            uint64_t offset = p->blocks[i].offset;
            for (uint32_t k = 0; k < p->blocks[i].n; k++) {
                uint32_t item = p->blocks[i].first + k;
                out[item] = (gm_shards_place){n_runs, offset, size};
                offset += gm_round_up(items[item].numel, p->unit);
            }
        }
    }
}

gm_status gm_shards_place_all(const gm_shards_item *items, uint32_t n, uint64_t unit, uint64_t most,
                              uint32_t n_shards, gm_shards_place *out)
{
    packer p = {.unit = unit, .most = most, .n_shards = n_shards};
    p.blocks = calloc((size_t)n + 1, sizeof *p.blocks);
    p.order = calloc((size_t)n + 1, sizeof *p.order);
    p.lead = calloc(n_shards, sizeof *p.lead);
    p.used = calloc(n_shards, sizeof *p.used);
    p.sums = calloc((size_t)n + 1, sizeof *p.sums);
    p.best = calloc((size_t)n + 1, sizeof *p.best);
    p.from = calloc((size_t)n + 1, sizeof *p.from);
    gm_status status = GM_OK;
    if (!p.blocks || !p.order || !p.lead || !p.used || !p.sums || !p.best || !p.from) {
        status = GM_FAIL(GM_ERR_NOMEM, "HOST: layout of %u parameters", n);
    } else {
        make_blocks(&p, items, n);
        for (uint32_t end = 1; end <= p.n_blocks; end++) {
            p.sums[end] = p.sums[end - 1] + p.blocks[end - 1].take;
            choose(&p, end);
        }
        tell(&p, items, out);
    }
    free(p.blocks);
    free(p.order);
    free(p.lead);
    free(p.used);
    free(p.sums);
    free(p.best);
    free(p.from);
    return status;
}
