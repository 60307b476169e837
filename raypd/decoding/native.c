// For CPUs with AVX-512 BF16; native.py says what each function takes.
//
// Attention over the cache is what triton_kernel.py does on a GPU, from the same plan (plan.py). Products of bfloat16 are
// summed in float32; scores and weights' sums are float32, weights are rounded to bfloat16.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS static inline __attribute__((always_inline))
enum { ROWS = 192, KEYS = 64, DIM = 576 };  // most rows at once, keys of a block, numbers of a key or a value
enum { WIDTH = 32, HEIGHT = 12, PART = 384 };  // of a linear layer: outputs and rows at once, most rows of a part
#define LOG2E 1.44269504f  // e^x = 2^(x * LOG2E)
typedef uint16_t bf16;

typedef struct {  // Item in plan.py; the last two are for GPUs
    int32_t first, queries, prefix_slot, prefix, own_slot, own, clear, key, prefix_begin, split_row;
} Item;

typedef struct {  // pointers, and sizes in numbers
    const bf16 *asked, *keys, *values;  // [tokens, heads, dim], [slots, kv_heads, dim], [slots, kv_heads, value_dim]
    bf16 *out;                          // [tokens, heads, value_dim]
    const Item *items;
    const int32_t *queries, *own_keys, *starts;  // as plan.py has them; starts: NULL without a window
    uint64_t *seen;                              // [tokens, blocks] what raypd_see finds: of each key, one bit
    int64_t item_count, token_stride, head_stride, key_slot, key_head, value_slot, value_head;  // the last four: strides
    int64_t heads, kv_heads, dim, value_dim, words, blocks, threads;
    float scale, softcap;  // softcap 0: none
    const float *sinks;    // [heads], NULL: none
} Call;

typedef struct {
    bf16 query[ROWS * DIM], weight[6 * KEYS];
    uint32_t key[DIM / 2 * KEYS], value[KEYS / 2 * DIM];  // pairs of numbers: of a key two of its, of values those of two keys
    float score[6 * KEYS], mixed[ROWS * DIM], total[ROWS * 16];
    float high[ROWS];
} __attribute__((aligned(64))) Block;

// 2^x, to a few units of the last place; 0 where x is far below.
ALWAYS __m512 exp2_of(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), part = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(1.32644129e-3f);
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.67141231e-3f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.55073362e-2f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.40222437e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.93146978e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

// Of `product`, what pair p of each row adds to the sums.
ALWAYS void add_pair(int r, int vectors, const bf16 *rows, int64_t row_stride, const uint32_t *packed, int64_t packed_stride,
                     int64_t p, __m512 held[HEIGHT][4]) {
    __m512bh right[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) right[v] = (__m512bh)_mm512_loadu_si512(packed + p * packed_stride + 16 * v);
#pragma GCC unroll 12
    for (int i = 0; i < r; i++) {
        int32_t two;
        memcpy(&two, rows + i * row_stride + 2 * p, 4);
        __m512bh left = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) held[i][v] = _mm512_dpbf16_ps(held[i][v], left, right[v]);
    }
}

// Adds rows [r, 2 * pairs] of bfloat16 times `packed` [pairs, 16 * vectors] pairs to sums [r, 16 * vectors], or puts it there.
// Asks for `lines` cache lines from `next` on, at most one for each pair.
ALWAYS void product(int r, int vectors, const bf16 *rows, int64_t row_stride, const uint32_t *packed, int64_t packed_stride,
                    int64_t pairs, float *sums, int64_t sum_stride, int add, const char *next, int64_t lines) {
    __m512 held[HEIGHT][4];
#pragma GCC unroll 12
    for (int i = 0; i < r; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            held[i][v] = add ? _mm512_loadu_ps(sums + i * sum_stride + 16 * v) : _mm512_setzero_ps();
    int64_t p = 0, asked = lines < pairs ? lines : pairs;
    for (; p < asked; p++) {  // a loop of its own: most pairs ask for nothing
        _mm_prefetch(next + 64 * p, _MM_HINT_T1);
        add_pair(r, vectors, rows, row_stride, packed, packed_stride, p, held);
    }
    for (; p < pairs; p++) add_pair(r, vectors, rows, row_stride, packed, packed_stride, p, held);
#pragma GCC unroll 12
    for (int i = 0; i < r; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(sums + i * sum_stride + 16 * v, held[i][v]);
}

// 16 rows of 16 pairs from `from` on, to `to` with rows and columns swapped; rows from `count` on are zero.
static void transpose(const bf16 *from, int64_t stride, int64_t count, uint32_t *to, int64_t to_stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = i < count ? _mm512_loadu_si512(from + i * stride) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i low = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), high = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
        _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(to + (i + 4) * to_stride, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(to + (i + 12) * to_stride, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}

// Keys as [dim / 2, KEYS] pairs and values as [KEYS / 2, value_dim] pairs, of `count` slots; the rest is zero.
static void pack(const Call *call, Block *at, int64_t slot, int64_t kv_head, int64_t count) {
    int64_t stride = call->key_slot, value_stride = call->value_slot;
    const bf16 *key = call->keys + slot * stride + kv_head * call->key_head;
    const bf16 *value = call->values + slot * value_stride + kv_head * call->value_head;
    for (int64_t k = 0; k < KEYS; k += 16)
        for (int64_t d = 0; d < call->dim / 2; d += 16)
            transpose(key + k * stride + 2 * d, stride, count - k, at->key + d * KEYS + k, KEYS);
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t k = 0; k < KEYS; k += 2)
        for (int64_t d = 0; d < call->value_dim; d += 16) {
            const bf16 *from = value + k * value_stride + d;
            __m256i first = k < count ? _mm256_loadu_si256((const void *)from) : _mm256_setzero_si256();
            __m256i second = k + 1 < count ? _mm256_loadu_si256((const void *)(from + value_stride)) : _mm256_setzero_si256();
            __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
            _mm512_storeu_si512(at->value + k / 2 * call->value_dim + d, _mm512_permutexvar_epi16(zip, both));
        }
}

// Asks for the keys and values of slots [from, to), which come next, while others are worked on.
ALWAYS void fetch(const Call *call, int64_t from, int64_t to, int64_t kv_head) {
    for (int64_t k = from; k < to; k++) {
        const bf16 *key = call->keys + k * call->key_slot + kv_head * call->key_head;
        const bf16 *value = call->values + k * call->value_slot + kv_head * call->value_head;
        for (int64_t d = 0; d < call->dim; d += 32) _mm_prefetch((const void *)(key + d), _MM_HINT_T0);
        for (int64_t d = 0; d < call->value_dim; d += 32) _mm_prefetch((const void *)(value + d), _MM_HINT_T0);
    }
}

// cap * tanh(x / cap), by e^-2|x / cap|.
ALWAYS __m512 capped(__m512 x, float cap) {
    const __m512 unit = _mm512_set1_ps(1.0f);
    __m512 small = exp2_of(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2 * LOG2E / cap)));
    __m512 tanh = _mm512_div_ps(_mm512_sub_ps(unit, small), _mm512_add_ps(unit, small));
    __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mul_ps(_mm512_mask_sub_ps(tanh, below, _mm512_setzero_ps(), tanh), _mm512_set1_ps(cap));
}

// Of `n` rows from `row` on, the running sums with the first 16 * vectors packed keys, those that `seen` says of each row.
ALWAYS void tile(int n, int vectors, const Call *call, Block *at, int64_t row, const uint64_t *seen) {
    const __m512 lowest = _mm512_set1_ps(-INFINITY), by = _mm512_set1_ps((call->softcap != 0 ? 1 : call->scale) * LOG2E);
    product(n, vectors, at->query + row * call->dim, call->dim, at->key, KEYS, call->dim / 2, at->score, KEYS, 0, NULL, 0);
    for (int i = 0; i < n; i++) {
        float *mixed = at->mixed + (row + i) * call->value_dim;
        __m512 score[4], most = lowest;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            score[v] = _mm512_load_ps(at->score + i * KEYS + 16 * v);
            if (call->softcap != 0) score[v] = capped(_mm512_mul_ps(score[v], _mm512_set1_ps(call->scale)), call->softcap);
            most = _mm512_mask_max_ps(most, (__mmask16)(seen[i] >> (16 * v)), most, score[v]);
        }
        float before = at->high[row + i], new = _mm512_reduce_max_ps(_mm512_mul_ps(most, by)), high = new > before ? new : before;
        __m512 sum = _mm512_load_ps(at->total + 16 * (row + i)), base = _mm512_set1_ps(high == -INFINITY ? 0 : high);
        if (before != high) {  // before the first key it is -inf, and fade 2^-inf = 0
            __m512 fade = exp2_of(_mm512_sub_ps(_mm512_set1_ps(before), base));
            at->high[row + i] = high;
            sum = _mm512_mul_ps(sum, fade);
            for (int64_t d = 0; d < call->value_dim; d += 16)
                _mm512_storeu_ps(mixed + d, _mm512_mul_ps(_mm512_loadu_ps(mixed + d), fade));
        }
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            __m512 weight = exp2_of(_mm512_fmsub_ps(score[v], by, base));
            weight = _mm512_maskz_mov_ps((__mmask16)(seen[i] >> (16 * v)), weight);
            sum = _mm512_add_ps(sum, weight);
            _mm256_store_si256((void *)(at->weight + i * KEYS + 16 * v), (__m256i)_mm512_cvtneps_pbh(weight));
        }
        _mm512_store_ps(at->total + 16 * (row + i), sum);
    }
    float *mixed = at->mixed + row * call->value_dim;
    for (int64_t c = 0; c < call->value_dim; c += 64)
        if (call->value_dim - c >= 64)
            product(n, 4, at->weight, KEYS, at->value + c, call->value_dim, 8 * vectors, mixed + c, call->value_dim, 1, NULL, 0);
        else
            product(n, 2, at->weight, KEYS, at->value + c, call->value_dim, 8 * vectors, mixed + c, call->value_dim, 1, NULL, 0);
}

// Of `rows` rows from `row` on, the running sums with `count` keys from `slot` on. seen: for each query, `seen_stride`
// apart, its bits, or NULL where all see all. next: the first slot of what comes then, of head `next_head`.
static void take(const Call *call, Block *at, int64_t row, int64_t rows, int64_t slot, int64_t kv_head, int64_t count,
                 const uint64_t *seen, int64_t seen_stride, int64_t next, int64_t next_head) {
    int64_t repeat = call->heads / call->kv_heads;
    uint64_t there = count >= KEYS ? ~0ull : (1ull << count) - 1, any = 0, bits[6];
    for (int64_t q = 0; seen && q < rows / repeat; q++) any |= seen[q * seen_stride];
    if (seen && !any) return;
    pack(call, at, slot, kv_head, count);
    for (int64_t i = 0, n; i < rows; i += n) {
        n = rows - i >= 6 ? 6 : rows - i >= 3 ? 3 : 1;
        fetch(call, next + i * KEYS / rows, next + (i + n) * KEYS / rows, next_head);
        any = 0;
        for (int64_t j = 0; j < n; j++) any |= bits[j] = seen ? seen[(i + j) / repeat * seen_stride] & there : there;
        if (!any) continue;
#define TILE(n)                                                \
    do {                                                       \
        if (count > 32) tile(n, 4, call, at, row + i, bits);   \
        else tile(n, 2, call, at, row + i, bits);              \
    } while (0)
        if (n == 6) TILE(6);
        else if (n == 3) TILE(3);
        else TILE(1);
#undef TILE
    }
}

// Items [item, end) that stand side by side and share a prefix. then: the item that comes next, with head `then_head`.
static void attend(const Call *call, Block *at, const Item *item, const Item *end, int64_t kv_head, const Item *then,
                   int64_t then_head) {
    int64_t first = item->first, queries = end[-1].first + end[-1].queries - first;
    int64_t prefix_slot = item->prefix_slot, prefix = item->prefix;
    int64_t repeat = call->heads / call->kv_heads, rows = queries * repeat;
    for (int64_t i = 0; i < rows; i++) {
        int64_t token = first + i / repeat, head = kv_head * repeat + i % repeat;
        memcpy(at->query + i * call->dim, call->asked + token * call->token_stride + head * call->head_stride,
               2 * call->dim);
        at->high[i] = -INFINITY;
    }
    memset(at->mixed, 0, sizeof(float) * rows * call->value_dim);
    memset(at->total, 0, sizeof(float) * rows * 16);
    for (int64_t k = 0; k < prefix; k += KEYS) {
        int64_t count = prefix - k < KEYS ? prefix - k : KEYS;
        int64_t next = k + KEYS < prefix ? prefix_slot + k + KEYS : item->own_slot;
        uint64_t seen[ROWS];
        for (int64_t q = 0; call->starts && q < queries; q++) {  // positions of a prefix are 0, 1, 2, ...
            int64_t hidden = call->starts[first + q] - k;
            seen[q] = hidden <= 0 ? ~0ull : hidden >= count ? 0 : ~0ull << hidden;
        }
        take(call, at, 0, rows, prefix_slot + k, kv_head, count, call->starts ? seen : NULL, 1, next, kv_head);
    }
    for (; item < end; item++) {
        int64_t own = item->own, clear = call->starts ? 0 : item->clear;
        for (int64_t k = 0; k < own; k += KEYS) {
            int64_t count = own - k < KEYS ? own - k : KEYS, next = item->own_slot + k + KEYS, next_head = kv_head;
            if (k + KEYS >= own && item + 1 < end) next = item[1].own_slot;
            else if (k + KEYS >= own) next = then->prefix ? then->prefix_slot : then->own_slot, next_head = then_head;
            const uint64_t *seen = k + count > clear ? call->seen + item->first * call->blocks + k / KEYS : NULL;
            take(call, at, (item->first - first) * repeat, item->queries * repeat, item->own_slot + k, kv_head, count, seen,
                 call->blocks, next, next_head);
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        bf16 *out = call->out + ((first + i / repeat) * call->heads + kv_head * repeat + i % repeat) * call->value_dim;
        float total = _mm512_reduce_add_ps(_mm512_load_ps(at->total + 16 * i));
        if (call->sinks) total += exp2f(call->sinks[kv_head * repeat + i % repeat] * LOG2E - at->high[i]);
        __m512 part = _mm512_set1_ps(total > 0 ? 1 / total : 0);
        for (int64_t d = 0; d < call->value_dim; d += 16) {
            __m512 mixed = _mm512_mul_ps(_mm512_loadu_ps(at->mixed + i * call->value_dim + d), part);
            _mm256_storeu_si256((void *)(out + d), (__m256i)_mm512_cvtneps_pbh(mixed));
        }
    }
}

void raypd_attention(const Call *call) {
    const Item *items = call->items;
    int64_t repeat = call->heads / call->kv_heads, tokens = 0, runs = 0;
    int32_t ends[call->item_count + 1];  // of runs of items that share a prefix; items have the pass's order, without gaps
    for (int64_t i = 0; i < call->item_count; i++) tokens += items[i].queries;
    int64_t most = tokens * call->kv_heads / (4 * call->threads);  // of queries in a run, so that every thread has work
    if (most > ROWS / repeat) most = ROWS / repeat;
    ends[0] = 0;
    for (int64_t i = 0, begin = 0; i < call->item_count; i++) {
        const Item *one = items + i, *next = one + 1;
        int joined = i + 1 < call->item_count && one->prefix && next->prefix_slot == one->prefix_slot &&
                     next->prefix == one->prefix && next->first + next->queries - items[begin].first <= most;
        if (!joined) ends[++runs] = begin = i + 1;
    }
#pragma omp parallel num_threads((int)call->threads)
    {
        Block block;
        int64_t heads = call->kv_heads, all = runs * heads, chunk = all >= 16 * call->threads ? heads : 1;
#pragma omp for schedule(dynamic, chunk)
        for (int64_t i = 0; i < all; i++) {
            int64_t then = (i + 1) % chunk ? i + 1 : i + 1 + (call->threads - 1) * chunk;  // or another thread's
            if (then >= all) then = i;
            attend(call, &block, items + ends[i / heads], items + ends[i / heads + 1], i % heads,
                   items + ends[then / heads], then % heads);
        }
    }
}

// call->seen: by the rule of visibility, which own keys each query sees.
void raypd_see(const Call *call) {
    int64_t fields = 2 + 2 * call->words;
    const __m512i unit = _mm512_set1_epi32(1), stride = _mm512_mullo_epi32(_mm512_set1_epi32(3), _mm512_set_epi32(
        15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
#pragma omp parallel for num_threads((int)call->threads) schedule(dynamic)
    for (int64_t i = 0; i < call->item_count; i++) {
        const Item *item = call->items + i;
        int64_t own = item->own, clear = call->starts ? 0 : item->clear / KEYS * KEYS;
        for (int64_t k = clear; k < own; k += 16) {
            __mmask16 there = own - k >= 16 ? 0xffff : (__mmask16)((1 << (own - k)) - 1);
            const int32_t *of = call->own_keys + (item->key + k) * 3;
            __m512i position = _mm512_mask_i32gather_epi32(unit, there, stride, of, 4);
            __m512i step = _mm512_mask_i32gather_epi32(unit, there, stride, of + 1, 4);
            __m512i segment = _mm512_mask_i32gather_epi32(unit, there, stride, of + 2, 4);
            __m512i bit = _mm512_sllv_epi32(unit, _mm512_and_si512(segment, _mm512_set1_epi32(31)));
            __m512i word = _mm512_srli_epi32(segment, 5);
            for (int64_t q = item->first; q < item->first + item->queries; q++) {
                const int32_t *query = call->queries + q * fields;
                __mmask16 upto = _mm512_cmple_epi32_mask(position, _mm512_set1_epi32(query[0])), seen = 0;
                for (int64_t w = 0; w < call->words; w++) {
                    __mmask16 whole = _mm512_test_epi32_mask(bit, _mm512_set1_epi32(query[2 + w]));
                    __mmask16 causal = _mm512_test_epi32_mask(bit, _mm512_set1_epi32(query[2 + call->words + w]));
                    seen |= (whole | (causal & upto)) & _mm512_cmpeq_epi32_mask(word, _mm512_set1_epi32((int32_t)w));
                }
                seen &= there & _mm512_cmple_epi32_mask(step, _mm512_set1_epi32(query[1]));
                if (call->starts) seen &= _mm512_cmpge_epi32_mask(position, _mm512_set1_epi32(call->starts[q]));
                ((uint16_t *)(call->seen + q * call->blocks))[k / 16] = seen;
            }
        }
    }
}

ALWAYS __m512 wide(__m256i from) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(from), 16)); }

ALWAYS __m512 widened(const bf16 *from) { return wide(_mm256_loadu_si256((const void *)from)); }

// Up to 16 of `count` numbers; -inf for the others.
ALWAYS __m512 upto(const bf16 *from, int64_t count) {
    __mmask16 there = count >= 16 ? 0xffff : (__mmask16)((1 << count) - 1);
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), there, wide(_mm256_maskz_loadu_epi16(there, from)));
}

// Rotary embedding in place: x [tokens, heads, dim] with cos and sin [tokens, dim].
void raypd_rotate(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t tokens, int64_t heads, int64_t dim,
                  int64_t token_stride, int64_t head_stride, int64_t threads) {
    int64_t half = dim / 2;
#pragma omp parallel for num_threads((int)threads)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t d = 0; d < half; d += 16) {
                bf16 *at = x + t * token_stride + h * head_stride + d;
                const bf16 *c = cos + t * dim + d, *s = sin + t * dim + d;
                __m512 low = widened(at), high = widened(at + half);
                __m512 new_low = _mm512_fnmadd_ps(high, widened(s), _mm512_mul_ps(low, widened(c)));
                __m512 new_high = _mm512_fmadd_ps(low, widened(s + half), _mm512_mul_ps(high, widened(c + half)));
                _mm256_storeu_si256((void *)at, (__m256i)_mm512_cvtneps_pbh(new_low));
                _mm256_storeu_si256((void *)(at + half), (__m256i)_mm512_cvtneps_pbh(new_high));
            }
}

// Rows of new tokens [tokens, heads, dim] to their slots [slots, heads, dim].
void raypd_store(const bf16 *new, const int64_t *slots, bf16 *store, int64_t tokens, int64_t heads, int64_t dim,
                 int64_t token_stride, int64_t token_head, int64_t slot_stride, int64_t slot_head, int64_t threads) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            memcpy(store + slots[t] * slot_stride + h * slot_head, new + t * token_stride + h * token_head, 2 * dim);
}

// Of each row of logits [rows, columns] the first of the highest, and its log-probability.
void raypd_greedy(const bf16 *logits, int64_t *token, float *logprob, int64_t rows, int64_t columns, int64_t threads) {
    const __m512i step = _mm512_set1_epi32(16);
#pragma omp parallel for num_threads((int)threads)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *row = logits + r * columns;
        __m512 high = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
        __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), at = place;
        for (int64_t c = 0; c < columns; c += 16, place = _mm512_add_epi32(place, step)) {
            __m512 some = upto(row + c, columns - c);
            __mmask16 more = _mm512_cmp_ps_mask(some, high, _CMP_GT_OQ);
            at = _mm512_mask_mov_epi32(at, more, place);
            high = _mm512_mask_mov_ps(high, more, some);
        }
        float most = _mm512_reduce_max_ps(high);
        __mmask16 best = _mm512_cmp_ps_mask(high, _mm512_set1_ps(most), _CMP_EQ_OQ);
        token[r] = _mm512_mask_reduce_min_epi32(best, at);
        for (int64_t c = 0; c < columns;) {  // sums of sums, which lose less
            int64_t end = columns - c > 1024 ? c + 1024 : columns;
            __m512 part = _mm512_setzero_ps();
            for (; c < end; c += 16) {
                __m512 below = _mm512_sub_ps(upto(row + c, columns - c), _mm512_set1_ps(most));
                part = _mm512_add_ps(part, exp2_of(_mm512_mul_ps(below, _mm512_set1_ps(LOG2E))));
            }
            sum = _mm512_add_ps(sum, part);
        }
        logprob[r] = -logf(_mm512_reduce_add_ps(sum));
    }
}

// Rows of x [rows, dim] divided by their root mean square, times the weight; rounded where transformers rounds.
// style: NormStyle in sources.py.
void raypd_rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t dim, int64_t style, int64_t threads,
                    float eps) {
    const __m512 offset = _mm512_set1_ps(style == 2 ? 1 : 0);
#pragma omp parallel for num_threads((int)threads)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *row = x + r * dim;
        __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t d = 0; d < dim; d += 16) {
            __m512 one = widened(row + d);
            sum[d / 16 % 2] = _mm512_fmadd_ps(one, one, sum[d / 16 % 2]);
        }
        __m512 by = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1])) / (float)dim + eps));
        for (int64_t d = 0; d < dim; d += 16) {
            __m512 unit = _mm512_mul_ps(widened(row + d), by);
            if (style == 0) unit = wide((__m256i)_mm512_cvtneps_pbh(unit));
            __m512 scaled = _mm512_mul_ps(unit, _mm512_add_ps(widened(weight + d), offset));
            _mm256_storeu_si256((void *)(out + r * dim + d), (__m256i)_mm512_cvtneps_pbh(scaled));
        }
    }
}

// silu(gate) * up
ALWAYS __m256i gated(__m512 gate, __m512 up) {
    __m512 below = _mm512_add_ps(_mm512_set1_ps(1), exp2_of(_mm512_mul_ps(gate, _mm512_set1_ps(-LOG2E))));
    return (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_div_ps(gate, below), up));
}

// gelu(gate) * up, with gelu by tanh: gelu(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3))
ALWAYS __m256i gated_by_gelu(__m512 gate, __m512 up) {
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(gate, gate), gate);
    __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), gate);
    __m512 below = exp2_of(_mm512_mul_ps(inner, _mm512_set1_ps(-1.5957691216f * LOG2E)));
    below = _mm512_add_ps(_mm512_set1_ps(1), below);
    return (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_div_ps(gate, below), up));
}

// With up to `limit` of the gate, and between -limit and limit of up: gate * sigmoid(alpha * gate) * (up + 1)
ALWAYS __m256i clamped(__m512 gate, __m512 up, float alpha, float limit) {
    const __m512 unit = _mm512_set1_ps(1), most = _mm512_set1_ps(limit);
    gate = _mm512_min_ps(gate, most);
    up = _mm512_max_ps(_mm512_min_ps(up, most), _mm512_set1_ps(-limit));
    __m512 below = _mm512_add_ps(unit, exp2_of(_mm512_mul_ps(gate, _mm512_set1_ps(-alpha * LOG2E))));
    return (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_div_ps(gate, below), _mm512_add_ps(up, unit)));
}

// Of each row [gate, up], silu(gate) * up, or gelu(gate) * up. x [rows, 2 * dim] -> out [rows, dim]. gate: as of `Linear`.
void raypd_gated(const bf16 *x, bf16 *out, int64_t rows, int64_t dim, int64_t gate, int64_t threads) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < dim; d += 16) {
            __m512 by = widened(x + 2 * r * dim + d), up = widened(x + (2 * r + 1) * dim + d);
            __m256i made = gate == 1 ? gated(by, up) : gated_by_gelu(by, up);
            _mm256_storeu_si256((void *)(out + r * dim + d), made);
        }
}

// Sums [r, WIDTH] of r rows and a panel. A function of its own, so that the sums stay in registers.
static __attribute__((noinline)) void block(int64_t r, const bf16 *x, int64_t inputs, const uint32_t *panel, int64_t pairs,
                                            float *sums, const char *next, int64_t lines) {
    switch (r) {
#define CASE(r) case r: product(r, 2, x, inputs, panel, WIDTH, pairs, sums, WIDTH, 0, next, lines); break
        CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6);
        CASE(7); CASE(8); CASE(9); CASE(10); CASE(11); CASE(12);
#undef CASE
    }
}

// A linear layer: x [rows, inputs] times weights that lie as [panels, inputs / 2, WIDTH] pairs, each panel of WIDTH outputs.
// bias: [panels * WIDTH] or NULL. residual: [rows, outputs], added to what comes out, or NULL. gate: 16 outputs of a panel
// are gates, the others what they gate, and out [rows, outputs / 2] their products: GateKind in expert_weights.py. Sums go in the
// order of the inputs, whatever else is in the pass.
typedef struct {
    const bf16 *x;
    const uint32_t *weight;
    const float *bias;
    const bf16 *residual;
    bf16 *out;
    int64_t inputs, outputs, gate;
    float alpha, limit;
} Linear;

// `count` rows from `from` on and a panel of the layer.
static void linear_panel(const Linear *of, int64_t panel, int64_t from, int64_t count) {
    int64_t inputs = of->inputs, outputs = of->outputs, pairs = inputs / 2, columns = of->gate ? outputs / 2 : outputs;
    const uint32_t *at = of->weight + panel * pairs * WIDTH;
    int64_t blocks = (count + HEIGHT - 1) / HEIGHT, lines = blocks ? (2 * pairs + blocks - 1) / blocks : 0;
    int64_t there = outputs - panel * WIDTH < WIDTH ? outputs - panel * WIDTH : WIDTH;
    __mmask32 mask = (__mmask32)((1ull << there) - 1);
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = from + count * b / blocks, r = from + count * (b + 1) / blocks - first;
        const char *next = (const char *)(at + pairs * WIDTH) + 64 * b * lines;  // of the next panel
        float sums[HEIGHT * WIDTH] __attribute__((aligned(64)));
        block(r, of->x + first * inputs, inputs, at, pairs, sums, next, lines);
        for (int64_t i = 0; i < r; i++) {
            __m512 low = _mm512_load_ps(sums + i * WIDTH), high = _mm512_load_ps(sums + i * WIDTH + 16);
            bf16 *to = of->out + (first + i) * columns;
            if (of->bias) {
                low = _mm512_add_ps(low, _mm512_loadu_ps(of->bias + panel * WIDTH));
                high = _mm512_add_ps(high, _mm512_loadu_ps(of->bias + panel * WIDTH + 16));
            }
            if (of->residual) {
                __m512i more = _mm512_maskz_loadu_epi16(mask, of->residual + (first + i) * outputs + panel * WIDTH);
                low = _mm512_add_ps(low, wide(_mm512_castsi512_si256(more)));
                high = _mm512_add_ps(high, wide(_mm512_extracti64x4_epi64(more, 1)));
            }
            if (of->gate == 1) _mm256_storeu_si256((void *)(to + panel * WIDTH / 2), gated(low, high));
            else if (of->gate == 3) _mm256_storeu_si256((void *)(to + panel * WIDTH / 2), gated_by_gelu(low, high));
            else if (of->gate) _mm256_storeu_si256((void *)(to + panel * WIDTH / 2), clamped(low, high, of->alpha, of->limit));
            else _mm512_mask_storeu_epi16(to + panel * WIDTH, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

void raypd_linear(const bf16 *x, const uint32_t *weight, const float *bias, const bf16 *residual, bf16 *out, int64_t rows,
                  int64_t inputs, int64_t outputs, int64_t gate, int64_t threads) {
    const Linear of = {x, weight, bias, residual, out, inputs, outputs, gate, 0, 0};
    int64_t panels = (outputs + WIDTH - 1) / WIDTH;
    int64_t parts = (rows + PART - 1) / PART, most = (rows + HEIGHT - 1) / HEIGHT;  // parts of x that stay in the L2 cache
    while (rows && parts * panels < 4 * threads && 2 * parts <= most) parts *= 2;             // so that every thread has work
#pragma omp parallel for num_threads((int)threads)
    for (int64_t n = 0; n < parts * panels; n++) {
        int64_t from = rows * (n / panels) / parts;
        linear_panel(&of, n % panels, from, rows * (n / panels + 1) / parts - from);
    }
}

// Linear layers side by side, of which layer n reads the rows from starts[n] to starts[n + 1] of x. weight: [layers, panels,
// inputs / 2, WIDTH] pairs; bias: [layers, panels * WIDTH] or NULL.
void raypd_grouped_linear(const bf16 *x, const uint32_t *weight, const float *bias, bf16 *out, const int64_t *starts,
                          int64_t layers, int64_t inputs, int64_t outputs, int64_t gate, int64_t threads, float alpha,
                          float limit) {
    int64_t panels = (outputs + WIDTH - 1) / WIDTH, size = panels * (inputs / 2) * WIDTH, parts = 0;
    int64_t begins[layers + 1];  // of each layer's parts among all
    for (int64_t n = 0; n < layers; n++) {
        begins[n] = parts;
        parts += (starts[n + 1] - starts[n] + PART - 1) / PART;
    }
    begins[layers] = parts;
#pragma omp parallel for schedule(dynamic, 4) num_threads((int)threads)
    for (int64_t n = 0; n < parts * panels; n++) {
        int64_t part = n / panels, low = 0, high = layers;  // the last layer that begins at or before the part
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (begins[middle] <= part) low = middle;
            else high = middle;
        }
        int64_t rows = starts[low + 1] - starts[low], of_layer = begins[low + 1] - begins[low];
        int64_t from = rows * (part - begins[low]) / of_layer, to = rows * (part - begins[low] + 1) / of_layer;
        const Linear of = {x, weight + low * size, bias ? bias + low * panels * WIDTH : NULL, NULL, out, inputs, outputs, gate,
                           alpha, limit};
        linear_panel(&of, n % panels, starts[low] + from, to - from);
    }
}

// residual [tokens, dim], plus what the experts of each token gave, times their weights: rows [rows, dim], of which number
// [tokens, k] are a token's, and weights [tokens, k].
void raypd_mix(const bf16 *rows, const int64_t *numbers, const float *weights, const bf16 *residual, bf16 *out, int64_t tokens,
               int64_t k, int64_t dim, int64_t threads) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < dim; d += 16) {
            __m512 sum = widened(residual + t * dim + d);
            for (int64_t i = t * k; i < (t + 1) * k; i++)
                sum = _mm512_fmadd_ps(widened(rows + numbers[i] * dim + d), _mm512_set1_ps(weights[i]), sum);
            _mm256_storeu_si256((void *)(out + t * dim + d), (__m256i)_mm512_cvtneps_pbh(sum));
        }
}

// Rows of x [rows, dim] as int8, each by a scale of its own.
void raypd_quantize(const bf16 *x, int8_t *out, float *scale, int64_t rows, int64_t dim, int64_t threads) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *row = x + r * dim;
        __m512 most = _mm512_set1_ps(1e-30f);
        for (int64_t d = 0; d < dim; d += 16) most = _mm512_max_ps(most, _mm512_abs_ps(widened(row + d)));
        float high = _mm512_reduce_max_ps(most);
        scale[r] = high / 127;
        for (int64_t d = 0; d < dim; d += 16) {
            __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(widened(row + d), _mm512_set1_ps(127 / high)));
            _mm_storeu_si128((void *)(out + r * dim + d), _mm512_cvtsepi32_epi8(whole));
        }
    }
}

// out = sums [rows, columns] times the scale of the row and that of the column.
void raypd_scale(const int32_t *sums, const float *row_scale, const float *column_scale, bf16 *out, int64_t rows,
                 int64_t columns, int64_t threads) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += 16) {
            __m512 by = _mm512_mul_ps(_mm512_set1_ps(row_scale[r]), _mm512_loadu_ps(column_scale + c));
            __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sums + r * columns + c)), by);
            _mm256_storeu_si256((void *)(out + r * columns + c), (__m256i)_mm512_cvtneps_pbh(sum));
        }
}

// ---------------------------------------------------------------------------------- recurrent layers

enum { MOST_INPUTS = 7, MOST_KEYS = 256 };  // of a convolution before a token, of a head of the delta rule

ALWAYS __m512 silu_of(__m512 x) {
    __m512 below = _mm512_add_ps(_mm512_set1_ps(1), exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2E))));
    return _mm512_div_ps(x, below);
}

// A causal convolution of each channel along the chains, with SiLU if `silu`. values [rows, channels], rows `stride` apart.
// store [slots, inputs, channels] has the last inputs of each state. taps [rows, inputs]: the inputs before each row, as the
// number of a row, or -1 - n for number n of the stored ones. The states in slots `ends` get the inputs `last` [written,
// inputs], by way of `scratch` [written, inputs, channels], since the old ones may be read for others. weight [inputs + 1,
// channels], bias [channels] or NULL.
void raypd_convolve(const bf16 *values, bf16 *store, const int64_t *taps, const int64_t *ends, const int64_t *last,
                    bf16 *scratch, const float *weight, const float *bias, float *out, int64_t rows, int64_t stride,
                    int64_t inputs, int64_t channels, int64_t written, int64_t silu, int64_t threads) {
#pragma omp parallel num_threads((int)threads)
    {
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            const bf16 *from[MOST_INPUTS + 1];
            for (int64_t i = 0; i < inputs; i++) {
                const int64_t tap = taps[r * inputs + i];
                from[i] = tap >= 0 ? values + tap * stride : store + (-1 - tap) * channels;
            }
            from[inputs] = values + r * stride;
            for (int64_t c = 0; c < channels; c += 16) {
                __m512 sum = bias ? _mm512_loadu_ps(bias + c) : _mm512_setzero_ps();
                for (int64_t i = 0; i <= inputs; i++)
                    sum = _mm512_fmadd_ps(widened(from[i] + c), _mm512_loadu_ps(weight + i * channels + c), sum);
                if (silu) sum = silu_of(sum);
                _mm512_storeu_ps(out + r * channels + c, sum);
            }
        }
#pragma omp for
        for (int64_t n = 0; n < written * inputs; n++) {
            const bf16 *from = last[n] >= 0 ? values + last[n] * stride : store + (-1 - last[n]) * channels;
            memcpy(scratch + n * channels, from, 2 * channels);
        }
#pragma omp for
        for (int64_t n = 0; n < written; n++)
            memcpy(store + ends[n] * inputs * channels, scratch + n * inputs * channels, 2 * inputs * channels);
    }
}

// log(1 + e^x), as torch has it.
ALWAYS float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// Of the gated delta rule, what remains of the state at each token and the rate of writing, [rows, heads] each. write and
// forget: the numbers before activation, rows `stride` apart.
void raypd_delta_rates(const bf16 *write, const bf16 *forget, const float *speed, const float *offset, float *kept, float *beta,
                       int64_t rows, int64_t stride, int64_t heads, int64_t threads) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            const uint32_t bits = (uint32_t)write[r * stride + h] << 16, other = (uint32_t)forget[r * stride + h] << 16;
            float w, f;
            memcpy(&w, &bits, 4);
            memcpy(&f, &other, 4);
            beta[r * heads + h] = 1 / (1 + expf(-w));
            kept[r * heads + h] = expf(-speed[h] * softplus(f + offset[h]));
        }
}

// Of Mamba-2, the step of each token between `lowest` and `highest`, and what remains of the state, [rows, heads] each.
void raypd_mamba_rates(const bf16 *steps, const float *speed, const float *offset, float *kept, float *out, int64_t rows,
                       int64_t stride, int64_t heads, int64_t threads, float lowest, float highest) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            const uint32_t bits = (uint32_t)steps[r * stride + h] << 16;
            float x;
            memcpy(&x, &bits, 4);
            x = fminf(fmaxf(softplus(x + offset[h]), lowest), highest);
            out[r * heads + h] = x;
            kept[r * heads + h] = expf(-speed[h] * x);
        }
}

// x [count] divided by its length, times `by`.
ALWAYS void unit(const float *x, int64_t count, float by, float *out) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 some = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(some, some, squares);
    }
    const __m512 factor = _mm512_set1_ps(by / sqrtf(_mm512_reduce_add_ps(squares) + 1e-6f));
    for (int64_t i = 0; i < count; i += 16) _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
}

// One token of the gated delta rule, for `vectors` vectors (at most 8) of a head's values from `state` on; the next state goes to `to`. A
// row of the state has `width` values.
ALWAYS void delta_token(const float *state, float *to, int64_t width, int64_t keys, const float *query, const float *key,
                        const float *value, float kept, float beta, float *out, const int64_t vectors) {
    __m512 read[8], change[8], sum[8];
    for (int64_t v = 0; v < vectors; v++) read[v] = sum[v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < keys; k++) {
        const __m512 factor = _mm512_set1_ps(key[k]);
        for (int64_t v = 0; v < vectors; v++)
            read[v] = _mm512_fmadd_ps(factor, _mm512_loadu_ps(state + k * width + 16 * v), read[v]);
    }
    const __m512 rest = _mm512_set1_ps(kept);
    for (int64_t v = 0; v < vectors; v++) {
        const __m512 wanted = _mm512_fnmadd_ps(rest, read[v], _mm512_loadu_ps(value + 16 * v));
        change[v] = _mm512_mul_ps(wanted, _mm512_set1_ps(beta));
    }
    for (int64_t k = 0; k < keys; k++) {
        const __m512 factor = _mm512_set1_ps(key[k]), asked = _mm512_set1_ps(query[k]);
        for (int64_t v = 0; v < vectors; v++) {
            const __m512 old = _mm512_mul_ps(rest, _mm512_loadu_ps(state + k * width + 16 * v));
            const __m512 next = _mm512_fmadd_ps(factor, change[v], old);
            _mm512_storeu_ps(to + k * width + 16 * v, next);
            sum[v] = _mm512_fmadd_ps(asked, next, sum[v]);
        }
    }
    for (int64_t v = 0; v < vectors; v++) _mm512_storeu_ps(out + 16 * v, sum[v]);
}

enum { CHUNK = 16, ROW = 64 };  // tokens of the gated delta rule that are computed at a time, and values of a block

// out [r, 16 * vectors] = by * from + sum over n < count of factors(i, n) * block [n, 16 * vectors], where the factors of row i
// are `row` numbers apart, and those of each n `step`. from: NULL for zero.
ALWAYS void blend(int r, int vectors, const float *factors, int64_t row, int64_t step, int64_t count, const float *block,
                  int64_t block_stride, const float *from, float by, float *out, int64_t stride) {
    __m512 held[6][4];
#pragma GCC unroll 6
    for (int i = 0; i < r; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            held[i][v] = from ? _mm512_mul_ps(_mm512_set1_ps(by), _mm512_loadu_ps(from + i * stride + 16 * v))
                              : _mm512_setzero_ps();
    for (int64_t n = 0; n < count; n++) {
        __m512 right[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) right[v] = _mm512_loadu_ps(block + n * block_stride + 16 * v);
#pragma GCC unroll 6
        for (int i = 0; i < r; i++) {
            const __m512 left = _mm512_set1_ps(factors[i * row + n * step]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) held[i][v] = _mm512_fmadd_ps(left, right[v], held[i][v]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < r; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(out + i * stride + 16 * v, held[i][v]);
}

// `blend` for any number of rows.
ALWAYS void blended(int64_t rows, int vectors, const float *factors, int64_t row, int64_t step, int64_t count, const float *block,
                    int64_t block_stride, const float *from, float by, float *out, int64_t stride) {
    int64_t i = 0;
    for (; i + 6 <= rows; i += 6)
        blend(6, vectors, factors + i * row, row, step, count, block, block_stride, from ? from + i * stride : NULL, by,
              out + i * stride, stride);
    for (; i < rows; i++)
        blend(1, vectors, factors + i * row, row, step, count, block, block_stride, from ? from + i * stride : NULL, by,
              out + i * stride, stride);
}

ALWAYS float dot(const float *a, const float *b, int64_t count) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), sum);
    return _mm512_reduce_add_ps(sum);
}

// What the tokens of a chunk are to each other and to the states around it; see scans.py.
typedef struct {
    float read[2 * CHUNK * MOST_KEYS];     // keys, then queries
    float written[CHUNK * MOST_KEYS];      // keys, times what remains of them behind the chunk
    float system[CHUNK * CHUNK];           // what the change of one token takes from those of later ones
    float score[CHUNK * CHUNK];            // what each query reads of the changes up to its own
    float kept[CHUNK], beta[CHUNK], rest;  // kept: of the state before the chunk, at each token and behind it
} Chunk;

// `vectors` vectors of a head's values: `count` tokens, with values and outputs `stride` apart.
ALWAYS void delta_block(const Chunk *of, int64_t count, int vectors, const float *state, float *to, int64_t width, int64_t keys,
                        const float *const *value, float *const *out) {
    float read[2 * CHUNK * ROW], change[CHUNK * ROW];
    blended(2 * count, vectors, of->read, keys, 1, keys, state, width, NULL, 0, read, ROW);
    for (int64_t i = 0; i < count; i++) {
        const __m512 rest = _mm512_set1_ps(of->kept[i]), rate = _mm512_set1_ps(of->beta[i]);
        __m512 own[4], sum[4];
        for (int v = 0; v < vectors; v++) {
            own[v] = _mm512_fnmadd_ps(rest, _mm512_loadu_ps(read + i * ROW + 16 * v), _mm512_loadu_ps(value[i] + 16 * v));
            own[v] = _mm512_mul_ps(own[v], rate);
            sum[v] = _mm512_mul_ps(rest, _mm512_loadu_ps(read + (count + i) * ROW + 16 * v));
        }
        for (int64_t j = 0; j < i; j++) {
            const __m512 taken = _mm512_set1_ps(of->system[i * CHUNK + j]), asked = _mm512_set1_ps(of->score[i * CHUNK + j]);
            for (int v = 0; v < vectors; v++) {
                const __m512 other = _mm512_loadu_ps(change + j * ROW + 16 * v);
                own[v] = _mm512_fnmadd_ps(taken, other, own[v]);
                sum[v] = _mm512_fmadd_ps(asked, other, sum[v]);
            }
        }
        const __m512 asked = _mm512_set1_ps(of->score[i * CHUNK + i]);
        for (int v = 0; v < vectors; v++) {
            _mm512_storeu_ps(change + i * ROW + 16 * v, own[v]);
            _mm512_storeu_ps(out[i] + 16 * v, _mm512_fmadd_ps(asked, own[v], sum[v]));
        }
    }
    // The states of a head have rows of the same width, whichever slot they are in.
    blended(keys, vectors, of->written, 1, keys, count, change, ROW, state, of->rest, to, width);
}

// Fills a chunk, whose keys, queries and betas are there.
static void delta_chunk(Chunk *of, int64_t count, int64_t keys, const float *kept, const int64_t *rows, int64_t heads,
                        int64_t head) {
    const float *query = of->read + count * keys;
    for (int64_t i = 0; i < count; i++) {
        const float rest = kept[rows[i] * heads + head];
        // What remains at token i of what an earlier token wrote is a product, never a quotient: it may be 0.
        float since = 1;
        of->score[i * CHUNK + i] = dot(query + i * keys, of->read + i * keys, keys);
        for (int64_t j = i - 1; j >= 0; j--) {
            since *= kept[rows[j + 1] * heads + head];
            of->system[i * CHUNK + j] = of->beta[i] * since * dot(of->read + i * keys, of->read + j * keys, keys);
            of->score[i * CHUNK + j] = since * dot(query + i * keys, of->read + j * keys, keys);
        }
        of->kept[i] = i ? of->kept[i - 1] * rest : rest;
    }
    of->rest = of->kept[count - 1];
    float behind = 1;
    for (int64_t i = count - 1; i >= 0; i--) {
        for (int64_t k = 0; k < keys; k += 16)
            _mm512_storeu_ps(of->written + i * keys + k,
                             _mm512_mul_ps(_mm512_set1_ps(behind), _mm512_loadu_ps(of->read + i * keys + k)));
        behind *= kept[rows[i] * heads + head];
    }
}

// The gated delta rule over runs. Run r has the rows rows[offsets[r]] to rows[offsets[r + 1] - 1], goes on from the state in
// slot starts[r] and leaves its own in slot ends[r]. The runs of a group, groups[g] to groups[g + 1] - 1, are computed one
// after the other, each behind those that it goes on from. mixed [tokens, 2 * key_heads * keys + heads * values]: queries,
// keys and values. out [tokens, heads, values].
void raypd_delta_scan(float *states, const int64_t *starts, const int64_t *ends, const int64_t *offsets, const int64_t *rows,
                      const int64_t *groups, const float *mixed, const float *kept, const float *beta, float *out,
                      int64_t group_count, int64_t heads, int64_t key_heads, int64_t keys, int64_t values, int64_t threads) {
    const int64_t size = keys * values, stride = 2 * key_heads * keys + heads * values;
    const float scale = 1 / sqrtf((float)keys);
#pragma omp parallel num_threads((int)threads)
    {
        Chunk chunk;
#pragma omp for schedule(dynamic)
        for (int64_t at = 0; at < group_count * heads; at++) {
            const int64_t group = at / heads, head = at % heads, key_head = head / (heads / key_heads);
            for (int64_t run = groups[group]; run < groups[group + 1]; run++) {
                const float *state = states + (starts[run] * heads + head) * size;
                float *to = states + (ends[run] * heads + head) * size;
                for (int64_t first = offsets[run], count; first < offsets[run + 1]; first += count) {
                    const float *value[CHUNK];
                    float *result[CHUNK];
                    count = offsets[run + 1] - first < CHUNK ? offsets[run + 1] - first : CHUNK;
                    for (int64_t i = 0; i < count; i++) {
                        const float *row = mixed + rows[first + i] * stride;
                        unit(row + (key_heads + key_head) * keys, keys, 1, chunk.read + i * keys);
                        unit(row + key_head * keys, keys, scale, chunk.read + (count + i) * keys);
                        value[i] = row + 2 * key_heads * keys + head * values;
                        result[i] = out + (rows[first + i] * heads + head) * values;
                        chunk.beta[i] = beta[rows[first + i] * heads + head];
                    }
                    if (count == 1) {
                        const float rest = kept[rows[first] * heads + head];
                        const float *query = chunk.read + keys, *key = chunk.read;
                        int64_t v = 0;
#define TOKENS(vectors)                                                                                             \
    for (; v + 16 * vectors <= values; v += 16 * vectors)                                                           \
        delta_token(state + v, to + v, values, keys, query, key, value[0] + v, rest, chunk.beta[0], result[0] + v, vectors)
                        TOKENS(8);  // whole rows, if possible: memory is read in order
                        TOKENS(4);
                        TOKENS(1);
#undef TOKENS
                        state = to;
                        continue;
                    }
                    delta_chunk(&chunk, count, keys, kept, rows + first, heads, head);
                    for (int64_t v = 0; v < values;) {
                        const int64_t step = values - v >= ROW ? ROW : 16;
                        if (step == ROW) delta_block(&chunk, count, 4, state + v, to + v, values, keys, value, result);
                        else delta_block(&chunk, count, 1, state + v, to + v, values, keys, value, result);
                        for (int64_t i = 0; i < count; i++) {
                            value[i] += step;
                            result[i] += step;
                        }
                        v += step;
                    }
                    state = to;
                }
            }
        }
    }
}

// Mamba-2 over runs, as raypd_delta_scan. mixed [tokens, heads * dim + 2 * key_groups * state_size]: inputs, and what is
// written into the state (B) and read of it (C). through [heads]: the share of the input that goes to the output (D).
void raypd_mamba_scan(float *states, const int64_t *starts, const int64_t *ends, const int64_t *offsets, const int64_t *rows,
                      const int64_t *groups, const float *mixed, const float *steps, const float *kept, const float *through,
                      float *out, int64_t group_count, int64_t heads, int64_t key_groups, int64_t dim, int64_t state_size,
                      int64_t threads) {
    const int64_t size = dim * state_size, stride = heads * dim + 2 * key_groups * state_size;
#pragma omp parallel for num_threads((int)threads) schedule(dynamic)
    for (int64_t at = 0; at < group_count * heads; at++) {
        const int64_t group = at / heads, head = at % heads, key_group = head / (heads / key_groups);
        for (int64_t run = groups[group]; run < groups[group + 1]; run++) {
            const float *state = states + (starts[run] * heads + head) * size;
            float *to = states + (ends[run] * heads + head) * size;
            for (int64_t i = offsets[run]; i < offsets[run + 1]; i++) {
                const float *row = mixed + rows[i] * stride, *x = row + head * dim;
                const float *key = row + heads * dim + key_group * state_size, *query = key + key_groups * state_size;
                const float step = steps[rows[i] * heads + head];
                const __m512 rest = _mm512_set1_ps(kept[rows[i] * heads + head]);
                float *result = out + (rows[i] * heads + head) * dim;
                for (int64_t p = 0; p < dim; p++) {
                    const __m512 factor = _mm512_set1_ps(step * x[p]);
                    __m512 sum = _mm512_setzero_ps();
                    for (int64_t n = 0; n < state_size; n += 16) {
                        const __m512 old = _mm512_mul_ps(rest, _mm512_loadu_ps(state + p * state_size + n));
                        const __m512 next = _mm512_fmadd_ps(factor, _mm512_loadu_ps(key + n), old);
                        _mm512_storeu_ps(to + p * state_size + n, next);
                        sum = _mm512_fmadd_ps(_mm512_loadu_ps(query + n), next, sum);
                    }
                    result[p] = _mm512_reduce_add_ps(sum) + through[head] * x[p];
                }
                state = to;
            }
        }
    }
}

// Parts [rows, parts, dim] of x, gated by SiLU and divided by their root mean square; gated first if `gate_first`. gate: rows
// `stride` apart. weight: [dim] or, if `apart`, [parts, dim]; NULL for no norm. Rounds once.
void raypd_gated_norm(const float *x, const bf16 *gate, const bf16 *weight, bf16 *out, int64_t rows, int64_t stride,
                      int64_t parts, int64_t dim, int64_t gate_first, int64_t apart, int64_t threads, float eps) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t n = 0; n < rows * parts; n++) {
        const float *from = x + n * dim;
        const bf16 *g = gate + n / parts * stride + n % parts * dim, *w = weight + (apart ? n % parts * dim : 0);
        __m512 squares = _mm512_setzero_ps(), factor = _mm512_set1_ps(1);
        if (weight) {
            for (int64_t d = 0; d < dim; d += 16) {
                __m512 some = _mm512_loadu_ps(from + d);
                if (gate_first) some = _mm512_mul_ps(some, silu_of(widened(g + d)));
                squares = _mm512_fmadd_ps(some, some, squares);
            }
            factor = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(squares) / (float)dim + eps));
        }
        for (int64_t d = 0; d < dim; d += 16) {
            __m512 some = _mm512_mul_ps(_mm512_loadu_ps(from + d), silu_of(widened(g + d)));
            some = _mm512_mul_ps(some, factor);
            if (weight) some = _mm512_mul_ps(some, widened(w + d));
            _mm256_storeu_si256((void *)(out + n * dim + d), (__m256i)_mm512_cvtneps_pbh(some));
        }
    }
}

// x [rows, dim] times the sigmoid of the gate, whose rows are `stride` apart, in place.
void raypd_sigmoid_gate(bf16 *x, const bf16 *gate, int64_t rows, int64_t stride, int64_t dim, int64_t threads) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < dim; d += 16) {
            const __m512 below = exp2_of(_mm512_mul_ps(widened(gate + r * stride + d), _mm512_set1_ps(-LOG2E)));
            const __m512 gated = _mm512_div_ps(widened(x + r * dim + d), _mm512_add_ps(_mm512_set1_ps(1), below));
            _mm256_storeu_si256((void *)(x + r * dim + d), (__m256i)_mm512_cvtneps_pbh(gated));
        }
}
