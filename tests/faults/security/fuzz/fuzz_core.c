/*
 * Feeds the C core trailers, block files and gather lists that were valid once.
 * Exit 0: it took or refused all of them as the format says; 1: it did not.
 * Compiled with sanitizers, which watch every byte it touches.
 *
 * fuzz_core SEED TRAILERS FILES LISTS; works in the current directory.
 */
#include "kvio.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define NAME "block"
#define MOST_PAYLOAD 9000

static uint64_t random_state;

static uint64_t random64(void)		/* splitmix64 */
{
	uint64_t z = random_state += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static size_t below(size_t n)
{
	return (size_t)(random64() % n);
}

static void fail(const char *what, uint64_t round)
{
	fprintf(stderr, "round %llu: %s\n", (unsigned long long)round, what);
	exit(1);
}

static void check(int good, const char *what, uint64_t round)
{
	if (!good)
		fail(what, round);
}

static void fill(uint8_t *out, size_t nbytes)
{
	for (size_t i = 0; i < nbytes; i++)
		out[i] = (uint8_t)random64();
}

static void *memory(size_t nbytes)	/* of just this length: one byte more is an error */
{
	void *found = malloc(nbytes ? nbytes : 1);

	if (!found)
		fail("no memory", 0);
	return found;
}

static uint64_t number(const uint8_t *in, int nbytes)
{
	uint64_t value = 0;

	while (nbytes--)
		value = value << 8 | in[nbytes];
	return value;
}

static void put(uint8_t *out, uint64_t value, int nbytes)
{
	for (int i = 0; i < nbytes; i++)
		out[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t interesting(uint64_t near)
{
	static const uint64_t some[] = {
		0, 1, 63, 64, 65, 4095, 4096, 65535, 65536, 1u << 31, 0xffffffffu, (uint64_t)1 << 32,
		(uint64_t)1 << 62, (uint64_t)1 << 63, ~(uint64_t)63, ~(uint64_t)64, ~(uint64_t)0,
	};

	switch (below(4)) {
	case 0:
		return near + below(140) - 70;
	case 1:
		return random64() >> below(64);
	default:
		return some[below(sizeof(some) / sizeof(some[0]))];
	}
}

/* Change a sealed trailer; half the time as one who knows how to seal it again. */
static void mutate(uint8_t trailer[KVIO_TRAILER_BYTES], uint64_t near)
{
	static const int at[] = { 0, 8, 10, 12, 16, 24, 40, 60 }, wide[] = { 8, 2, 2, 4, 8, 8, 8, 4 };
	size_t changes = below(4);

	while (changes--) {
		size_t field = below(8);

		switch (below(3)) {
		case 0:
			trailer[below(KVIO_TRAILER_BYTES)] ^= (uint8_t)(1u << below(8));
			break;
		case 1:
			trailer[below(KVIO_TRAILER_BYTES)] = (uint8_t)random64();
			break;
		default:
			put(trailer + at[field], interesting(near), wide[field]);
		}
	}
	if (below(2))
		put(trailer + 60, kvio_crc32c(0, trailer, 60), 4);
}

/* What docs/format.md says, written anew. */
static int is_trailer(const uint8_t *in, uint64_t file_nbytes, const uint8_t *key_hash, int verify)
{
	uint64_t nbytes = number(in + 16, 8);
	int checked = verify != KVIO_VERIFY_OFF;

	return !memcmp(in, "KVIOBLK\n", 8) && number(in + 8, 2) == 1 && number(in + 10, 2) < 2 &&
	       (!checked || kvio_crc32c(0, in, 60) == number(in + 60, 4)) &&
	       nbytes <= file_nbytes - 64 && file_nbytes - 64 - nbytes < 65536 &&
	       (!checked || !memcmp(in + 24, key_hash, 16));
}

static void fuzz_trailers(uint64_t rounds)
{
	uint64_t accepted = 0;

	for (uint64_t i = 0; i < rounds; i++) {
		uint64_t payload = below(2) ? below(MOST_PAYLOAD) : interesting(0) >> 1;
		uint64_t file = payload + KVIO_TRAILER_BYTES + (below(3) ? 0 : below(70000));
		uint8_t *in = memory(KVIO_TRAILER_BYTES), *key_hash = memory(16);
		int verify = (int)below(3), good, r;
		struct kvio_trailer out = { 0, 0, 0 };
		kvio_op op = { .nbytes = payload };

		fill(op.key_hash, 16);
		memcpy(key_hash, op.key_hash, 16);
		kvio_trailer_seal(in, &op, (uint32_t)random64(), below(2) ? KVIO_CHECKSUM : 0);
		mutate(in, payload);
		if (!below(4))
			file = interesting(file) | KVIO_TRAILER_BYTES;
		if (file < KVIO_TRAILER_BYTES)
			file = KVIO_TRAILER_BYTES;
		r = kvio_trailer_parse(in, file, key_hash, verify, &out);
		good = is_trailer(in, file, key_hash, verify);
		check((r == 0) == good, "a trailer was taken that is none, or refused", i);
		check(r || out.nbytes + KVIO_TRAILER_BYTES <= file, "a payload beyond its file", i);
		accepted += (uint64_t)!r;
		free(in);
		free(key_hash);
	}
	check(!rounds || (accepted > rounds / 20 && accepted < rounds), "nothing was tried", accepted);
}

static void write_file(int dirfd, const uint8_t *content, size_t nbytes)
{
	int fd = openat(dirfd, NAME, O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0600);

	check(fd >= 0 && write(fd, content, nbytes) == (ssize_t)nbytes && !close(fd), "no file", 0);
}

/* A block's file that was changed, cut or lengthened; its bytes and how many. */
static uint8_t *make_content(kvio_op *op, size_t *nbytes)
{
	size_t payload = below(MOST_PAYLOAD), padding = below(3) ? 0 : below(5000), end;
	uint8_t *content = memory(payload + padding + KVIO_TRAILER_BYTES + 5000);

	op->nbytes = payload;
	fill(op->key_hash, 16);
	fill(content, payload);
	end = payload + padding;
	memset(content + payload, 0, padding);
	kvio_trailer_seal(content + end, op, kvio_crc32c(0, content, payload),
			  below(8) ? KVIO_CHECKSUM : 0);
	if (below(4))
		mutate(content + end, payload);
	end += KVIO_TRAILER_BYTES;
	if (!below(3) && payload)
		content[below(payload)] ^= 1;
	if (!below(6))
		end = below(end + 1);
	if (!below(6)) {
		memset(content + end, (int)below(2), 5000 - KVIO_TRAILER_BYTES);
		end += below(5000 - KVIO_TRAILER_BYTES);
	}
	*nbytes = end;
	return content;
}

static void fuzz_file(int dirfd, uint8_t *bounce, uint64_t round, uint64_t *good)
{
	kvio_call call = { .flags = KVIO_TRAILER | KVIO_CHECKSUM, .memory_align = 1,
			   .offset_align = 1, .chunk_bytes = 1u << (6 + below(12)),
			   .bounce = bounce, .bounce_bytes = 1 << 16 };
	kvio_op op = { .dirfd = dirfd, .name = NAME, .fd = -1 };
	size_t nbytes, room, nparts = 1 + below(4);
	uint8_t *content = make_content(&op, &nbytes), *out[4] = { 0 };
	kvio_part parts[4];
	uint32_t crc = 0;
	int r;

	write_file(dirfd, content, nbytes);
	call.verify = (int)below(3);
	room = below(3) ? (size_t)op.nbytes : below(2 * MOST_PAYLOAD);
	op.nbytes = 0;
	for (size_t p = 0; p < nparts; p++) {
		parts[p].nbytes = p + 1 == nparts ? room - op.nbytes : below(room - op.nbytes + 1);
		parts[p].base = out[p] = memory(parts[p].nbytes);
		op.nbytes += parts[p].nbytes;
	}
	op.parts = parts;
	op.nparts = (uint32_t)nparts;
	switch (below(5)) {
	case 0:
		op.flags = KVIO_OP_RANGE;
		op.offset = below(2) ? below(MOST_PAYLOAD) : interesting(nbytes) >> 2;
		break;
	case 1:
		op.flags = KVIO_OP_SCRUB;
	}
	if (!below(6))
		r = kvio_stat_batch(&call, &op, 1);
	else
		r = kvio_read_batch(&call, &op, 1);
	if (op.status || op.flags & (KVIO_OP_RANGE | KVIO_OP_SCRUB))
		goto end;
	check(op.block_nbytes + KVIO_TRAILER_BYTES <= nbytes, "a block longer than its file", round);
	if (call.verify == KVIO_VERIFY_FULL && op.flags & KVIO_OP_HAS_CHECKSUM && op.done) {
		for (size_t p = 0, left = op.done; p < nparts; left -= parts[p].nbytes, p++) {
			crc = kvio_crc32c(crc, out[p], kvio_min(parts[p].nbytes, left));
			if (left <= parts[p].nbytes)
				break;
		}
		check(crc == op.crc && crc == kvio_crc32c(0, content, op.done), "rot came out", round);
	}
	*good += (uint64_t)r;
end:
	for (size_t p = 0; p < nparts; p++)
		free(out[p]);
	free(content);
}

static void fuzz_files(uint64_t rounds)
{
	int dirfd = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	uint8_t *bounce = memory(1 << 16);
	uint64_t good = 0;

	check(dirfd >= 0, "no directory", 0);
	for (uint64_t i = 0; i < rounds; i++)
		fuzz_file(dirfd, bounce, i, &good);
	check(!rounds || (good > rounds / 50 && good < rounds), "nothing was tried", good);
	check(dup(dirfd) == dirfd + 1, "a descriptor was left open", 0);
	free(bounce);
}

/* Gather lists of any shape, empty pieces too: what is copied is what lies there. */
static void fuzz_lists(uint64_t rounds)
{
	for (uint64_t i = 0; i < rounds; i++) {
		size_t nbytes = below(3000), done = 0, nparts = 1 + below(40), start, want;
		uint8_t *all = memory(nbytes), *got, *pieces[40];
		kvio_part parts[40];
		kvio_op op = { .parts = parts, .nparts = (uint32_t)nparts, .nbytes = nbytes };
		struct kvio_cursor cursor;
		uint32_t crc;

		fill(all, nbytes);
		for (size_t p = 0; p < nparts; p++) {
			size_t n = p + 1 == nparts ? nbytes - done : below(nbytes - done + 1) / (1 + below(9));

			pieces[p] = memory(n);
			memcpy(pieces[p], all + done, n);
			parts[p] = (kvio_part){ pieces[p], n };
			done += n;
		}
		start = below(nbytes + 1);
		want = below(nbytes - start + 1);
		got = memory(want);
		cursor = kvio_cursor_at(&op, start);
		crc = kvio_cursor_gather(&cursor, got, want, 0, 1);
		check(!memcmp(got, all + start, want), "other bytes were gathered", i);
		check(crc == kvio_crc32c(0, all + start, want), "another checksum", i);
		fill(got, want);
		cursor = kvio_cursor_at(&op, start);
		kvio_cursor_scatter(&cursor, got, want, 0, 0);
		memcpy(all + start, got, want);
		for (size_t p = 0, at = 0; p < nparts; at += parts[p].nbytes, p++)
			check(!memcmp(pieces[p], all + at, parts[p].nbytes), "scattered elsewhere", i);
		for (size_t p = 0; p < nparts; p++)
			free(pieces[p]);
		free(all);
		free(got);
	}
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	random_state = strtoull(argv[1], NULL, 10);
	fuzz_trailers(strtoull(argv[2], NULL, 10));
	fuzz_files(strtoull(argv[3], NULL, 10));
	fuzz_lists(strtoull(argv[4], NULL, 10));
	return 0;
}
