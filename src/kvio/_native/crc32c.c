/*
 * CRC32C (Castagnoli), RFC 3720 appendix B.4: bit reflected, initial value and final
 * xor ~0. Functions named update work on the raw register, without both inversions.
 */
#include "kvio.h"
#include "crc32c_tables.h"

#define COPY_BLOCK ((size_t)8 << 10)	/* still in L1 when summed */

static inline uint64_t load_le64(const uint8_t *p)
{
	uint64_t v;

	memcpy(&v, p, sizeof(v));
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
	v = __builtin_bswap64(v);
#endif
	return v;
}

/* ---- portable: slicing by 8 ---- */

static uint32_t update_portable(uint32_t crc, const uint8_t *p, size_t n)
{
	for (; n >= 8; n -= 8, p += 8) {
		uint64_t v = load_le64(p) ^ crc;

		crc = 0;
#pragma GCC unroll 8
		for (int k = 7; k >= 0; k--, v >>= 8)
			crc ^= slices[k][v & 255];
	}
	while (n--)
		crc = crc >> 8 ^ slices[0][(crc ^ *p++) & 255];
	return crc;
}

/* ---- crc and carry-less multiply instructions ---- */

#if defined(__x86_64__)
#include <immintrin.h>

#define INSTRUCTIONS __attribute__((target("sse4.2,pclmul")))

#define crc_u64(crc, v) _mm_crc32_u64(crc, v)
#define crc_u8(crc, v) _mm_crc32_u8((uint32_t)(crc), v)

static inline INSTRUCTIONS uint64_t clmul(uint64_t a, uint64_t b)
{
	return (uint64_t)_mm_cvtsi128_si64(_mm_clmulepi64_si128(
		_mm_cvtsi64_si128((int64_t)a), _mm_cvtsi64_si128((int64_t)b), 0));
}

#elif defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <sys/auxv.h>

#define INSTRUCTIONS
/* Assembly: gcc and clang spell the target differently, old clang hides the intrinsics. */
static inline uint64_t crc_u64(uint64_t crc, uint64_t v)
{
	__asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(v));
	return crc;
}

static inline uint64_t crc_u8(uint64_t crc, uint8_t v)
{
	__asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(v));
	return crc;
}

static inline uint64_t clmul(uint64_t a, uint64_t b)
{
	uint64x2_t v = vdupq_n_u64(a);

	__asm__(".arch_extension aes\n\tpmull %0.1q, %0.1d, %1.1d"
		: "+w"(v) : "w"(vdupq_n_u64(b)));
	return vgetq_lane_u64(v, 0);
}

#endif

#ifdef INSTRUCTIONS

/*
 * A crc instruction takes about three cycles but one can start every cycle, so
 * three adjacent streams run at once; then the first register has to move two
 * streams on and the second one stream.
 */
static inline INSTRUCTIONS uint64_t
three_streams(uint64_t crc, const uint8_t *p, size_t stream, uint32_t move, uint32_t move_two)
{
	uint64_t second = 0, third = 0;

	for (const uint8_t *end = p + stream; p < end; p += 8) {
		crc = crc_u64(crc, load_le64(p));
		second = crc_u64(second, load_le64(p + stream));
		third = crc_u64(third, load_le64(p + 2 * stream));
	}
	return third ^ crc_u64(0, clmul(crc, move_two) ^ clmul(second, move));
}

static INSTRUCTIONS uint32_t update_instructions(uint32_t start, const uint8_t *p, size_t n)
{
	uint64_t crc = start;

	for (; n >= 3 * STREAM; n -= 3 * STREAM, p += 3 * STREAM)
		crc = three_streams(crc, p, STREAM, MOVE_STREAM, MOVE_TWO_STREAMS);
	for (; n >= 3 * SHORT; n -= 3 * SHORT, p += 3 * SHORT)
		crc = three_streams(crc, p, SHORT, MOVE_SHORT, MOVE_TWO_SHORTS);
	for (; n >= 8; n -= 8, p += 8)
		crc = crc_u64(crc, load_le64(p));
	while (n--)
		crc = crc_u8(crc, *p++);
	return (uint32_t)crc;
}

#endif

/* ---- 512-bit vectors ---- */

#if defined(__x86_64__)

#define VECTORS __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))
#define LANES(...) _mm512_broadcast_i32x4(_mm_set_epi64x(__VA_ARGS__))

/*
 * Zen 4 starts one 512-bit clmul every second cycle, 16 bytes of input a cycle,
 * while its crc unit idles. So a group is vectors for ROUNDS rounds, two side
 * streams that the crc unit takes meanwhile, and a round of vectors that folds over
 * them: 58 -> 70 GB/s. The prefetch is for DRAM, three streams defeat the hardware's:
 * 12 -> 28 GB/s.
 */
#define GROUP (ROUNDS * 256 + 2 * SIDE + 256)

struct vectors { __m512i a, b, c, d; };

static inline VECTORS __m512i fold(__m512i v, __m512i by, __m512i add)
{
	return _mm512_ternarylogic_epi64(	/* 0x96: three-way xor */
		_mm512_clmulepi64_epi128(v, by, 0x00),
		_mm512_clmulepi64_epi128(v, by, 0x11), add, 0x96);
}

static inline VECTORS void fold_round(struct vectors *s, __m512i by, const uint8_t *p)
{
	s->a = fold(s->a, by, _mm512_loadu_si512(p));
	s->b = fold(s->b, by, _mm512_loadu_si512(p + 64));
	s->c = fold(s->c, by, _mm512_loadu_si512(p + 128));
	s->d = fold(s->d, by, _mm512_loadu_si512(p + 192));
}

static inline VECTORS __m512i add_register(__m512i v, uint64_t crc)
{
	return _mm512_xor_si512(v, _mm512_zextsi128_si512(_mm_cvtsi64_si128((int64_t)crc)));
}

static inline VECTORS void fold_group(struct vectors *s, const uint8_t *p)
{
	const uint8_t *const sides = p + ROUNDS * 256;
	uintptr_t ahead = (uintptr_t)p + 4096;
	uint64_t first = 0, second = 0;

	for (const uint8_t *side = sides; p < sides; p += 256) {
#pragma GCC unroll 5
		for (int i = 0; i < 5; i++, ahead += 64)
			_mm_prefetch((const char *)ahead, _MM_HINT_T0);
		fold_round(s, LANES(FOLD_2048), p);
#pragma GCC unroll 4
		for (int i = 0; i < 4; i++, side += 8) {
			first = crc_u64(first, load_le64(side));
			second = crc_u64(second, load_le64(side + SIDE));
		}
	}
	fold_round(s, LANES(FOLD_JUMP), sides + 2 * SIDE);
	s->a = add_register(s->a, second ^ crc_u64(0, clmul(first, MOVE_SIDE)));
}

static VECTORS uint32_t update_vectors(uint32_t crc, const uint8_t *p, size_t n)
{
	struct vectors s;
	uint8_t last[64];

	if (n < 256)	/* not even one round */
		return update_instructions(crc, p, n);
	s.a = add_register(_mm512_loadu_si512(p), crc);
	s.b = _mm512_loadu_si512(p + 64);
	s.c = _mm512_loadu_si512(p + 128);
	s.d = _mm512_loadu_si512(p + 192);
	for (n -= 256, p += 256; n >= GROUP; n -= GROUP, p += GROUP)
		fold_group(&s, p);
	for (; n >= 256; n -= 256, p += 256)
		fold_round(&s, LANES(FOLD_2048), p);
	s.d = fold(s.a, LANES(FOLD_1536), s.d);
	s.d = fold(s.b, LANES(FOLD_1024), s.d);
	s.d = fold(s.c, LANES(FOLD_512), s.d);
	for (; n >= 64; n -= 64, p += 64)
		s.d = fold(s.d, LANES(FOLD_512), _mm512_loadu_si512(p));
	_mm512_storeu_si512(last, s.d);
	return update_instructions(update_instructions(0, last, sizeof(last)), p, n);
}

#endif

/* ---- public ---- */

static inline int available(int implementation)
{
	switch (implementation) {
	case KVIO_CRC_PORTABLE:
		return 1;
#if defined(__x86_64__)
	case KVIO_CRC_SSE42:
		return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
	case KVIO_CRC_VPCLMUL:
		return __builtin_cpu_supports("avx512f") &&
		       __builtin_cpu_supports("vpclmulqdq") && available(KVIO_CRC_SSE42);
#elif defined(INSTRUCTIONS)
	case KVIO_CRC_ARMV8:
		return (~getauxval(AT_HWCAP) & (HWCAP_CRC32 | HWCAP_PMULL)) == 0;
#endif
	default:
		return 0;
	}
}

static uint32_t update(int implementation, uint32_t crc, const void *data, size_t nbytes)
{
#if defined(__x86_64__)
	if (implementation == KVIO_CRC_VPCLMUL)
		return update_vectors(crc, data, nbytes);
#endif
#ifdef INSTRUCTIONS
	if (implementation != KVIO_CRC_PORTABLE)
		return update_instructions(crc, data, nbytes);
#endif
	(void)implementation;
	return update_portable(crc, data, nbytes);
}

int kvio_crc32c_available(int implementation)
{
	return available(implementation);
}

int kvio_crc32c_implementation(void)
{
	return available(KVIO_CRC_VPCLMUL) ? KVIO_CRC_VPCLMUL :
	       available(KVIO_CRC_SSE42) ? KVIO_CRC_SSE42 :
	       available(KVIO_CRC_ARMV8) ? KVIO_CRC_ARMV8 : KVIO_CRC_PORTABLE;
}

uint32_t kvio_crc32c_with(int implementation, uint32_t crc, const void *data, size_t nbytes)
{
	return ~update(available(implementation) ? implementation : KVIO_CRC_PORTABLE,
		       ~crc, data, nbytes);
}

uint32_t kvio_crc32c(uint32_t crc, const void *data, size_t nbytes)
{
	return ~update(kvio_crc32c_implementation(), ~crc, data, nbytes);
}

/* Sums what arrived in dst: src may be memory that someone is changing. */
uint32_t kvio_crc32c_copy(uint32_t crc, void *dst, const void *src, size_t nbytes)
{
	const int implementation = kvio_crc32c_implementation();
	const uint8_t *from = src;
	uint8_t *to = dst;

	for (size_t n; nbytes > 0; nbytes -= n, from += n, to += n) {
		n = nbytes < COPY_BLOCK ? nbytes : COPY_BLOCK;
		__asm__("" : "+r"(n));	/* else gcc inlines a slow rep movs, as n is small */
		memcpy(to, from, n);
		crc = ~update(implementation, ~crc, to, n);
	}
	return crc;
}

static uint32_t multiply(uint32_t a, uint32_t b)
{
	uint32_t product = 0;

	for (; b != 0; b <<= 1) {
		product ^= b & X0 ? a : 0;
		a = a >> 1 ^ (a & 1 ? X32 : 0);
	}
	return product;
}

/* The inversions of the two parts cancel, so crc_a only moves on by nbytes_b. */
uint32_t kvio_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t nbytes_b)
{
	for (uint32_t power = X8; nbytes_b != 0; nbytes_b >>= 1) {
		if (nbytes_b & 1)
			crc_a = multiply(power, crc_a);
		power = multiply(power, power);
	}
	return crc_a ^ crc_b;
}
