/* BLAKE2b-128 without a key (RFC 7693), for hashing the names of blocks. */
#include "kvio.h"

#include <endian.h>

#define BLOCK_BYTES 128

static const uint64_t IV[8] = {
	0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
	0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const uint8_t SIGMA[10][16] = {
	{ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 },
	{ 14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3 },
	{ 11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4 },
	{ 7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8 },
	{ 9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13 },
	{ 2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9 },
	{ 12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11 },
	{ 13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10 },
	{ 6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5 },
	{ 10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0 },
};

static uint64_t rotate_right(uint64_t x, int n)
{
	return x >> n | x << (64 - n);
}

static inline void mix(uint64_t v[16], int a, int b, int c, int d, uint64_t x, uint64_t y)
{
	v[a] += v[b] + x;
	v[d] = rotate_right(v[d] ^ v[a], 32);
	v[c] += v[d];
	v[b] = rotate_right(v[b] ^ v[c], 24);
	v[a] += v[b] + y;
	v[d] = rotate_right(v[d] ^ v[a], 16);
	v[c] += v[d];
	v[b] = rotate_right(v[b] ^ v[c], 63);
}

static inline void mix_all(uint64_t v[16], const uint64_t m[16], const uint8_t s[16])
{
	mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
	mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
	mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
	mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
	mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
	mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
	mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
	mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
}

static uint64_t load_le64(const uint8_t *from)
{
	uint64_t x;

	memcpy(&x, from, sizeof(x));
	return le64toh(x);
}

static void compress(uint64_t h[8], const uint8_t block[BLOCK_BYTES], uint64_t counted, int last)
{
	uint64_t v[16], m[16];

	for (int i = 0; i < 16; i++)
		m[i] = load_le64(block + 8 * i);
	memcpy(v, h, 8 * sizeof(*h));
	memcpy(v + 8, IV, sizeof(IV));
	v[12] ^= counted;
	if (last)
		v[14] = ~v[14];
	/* One by one, so that the compiler sees which word goes where. */
	mix_all(v, m, SIGMA[0]);
	mix_all(v, m, SIGMA[1]);
	mix_all(v, m, SIGMA[2]);
	mix_all(v, m, SIGMA[3]);
	mix_all(v, m, SIGMA[4]);
	mix_all(v, m, SIGMA[5]);
	mix_all(v, m, SIGMA[6]);
	mix_all(v, m, SIGMA[7]);
	mix_all(v, m, SIGMA[8]);
	mix_all(v, m, SIGMA[9]);
	mix_all(v, m, SIGMA[0]);
	mix_all(v, m, SIGMA[1]);
	for (int i = 0; i < 8; i++)
		h[i] ^= v[i] ^ v[i + 8];
}

/* The digest of head and tail, joined. */
void kvio_blake2b_128(const void *head, size_t head_bytes, const void *tail, size_t tail_bytes,
		      uint8_t digest[16])
{
	const struct iovec pieces[2] = { { (void *)head, head_bytes }, { (void *)tail, tail_bytes } };
	uint8_t block[BLOCK_BYTES] = { 0 };
	uint64_t h[8], counted = 0;
	size_t held = 0;

	memcpy(h, IV, sizeof(IV));
	h[0] ^= 0x01010000 ^ 16;
	for (int i = 0; i < 2; i++) {
		const uint8_t *from = pieces[i].iov_base;
		size_t left = pieces[i].iov_len;

		while (left) {
			size_t n;

			if (held == BLOCK_BYTES) {
				counted += held;
				compress(h, block, counted, 0);
				held = 0;
			}
			n = kvio_min(left, BLOCK_BYTES - held);
			memcpy(block + held, from, n);
			held += n;
			from += n;
			left -= n;
		}
	}
	memset(block + held, 0, BLOCK_BYTES - held);
	compress(h, block, counted + held, 1);
	for (int i = 0; i < 2; i++) {
		uint64_t x = htole64(h[i]);

		memcpy(digest + 8 * i, &x, sizeof(x));
	}
}
