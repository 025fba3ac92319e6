/* The 64 bytes at the end of a block; docs/format.md has the table. */
#include "kvio.h"

#define MAGIC "KVIOBLK\n"
#define VERSION 1u
#define FLAG_CHECKSUM 1u

static void put_le(uint8_t *out, uint64_t value, int nbytes)
{
	for (int i = 0; i < nbytes; i++)
		out[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get_le(const uint8_t *in, int nbytes)
{
	uint64_t value = 0;

	for (int i = 0; i < nbytes; i++)
		value |= (uint64_t)in[i] << (8 * i);
	return value;
}

void kvio_trailer_seal(uint8_t out[KVIO_TRAILER_BYTES], const kvio_op *op, uint32_t crc,
		       uint32_t flags)
{
	int checksum = !!(flags & KVIO_CHECKSUM);

	memset(out, 0, KVIO_TRAILER_BYTES);
	memcpy(out, MAGIC, 8);
	put_le(out + 8, VERSION, 2);
	put_le(out + 10, checksum ? FLAG_CHECKSUM : 0, 2);
	put_le(out + 12, checksum ? crc : 0, 4);
	put_le(out + 16, op->nbytes, 8);
	memcpy(out + 24, op->key_hash, 16);
	put_le(out + 60, kvio_crc32c(0, out, 60), 4);
}

/* 0, or the KVIO_BAD_ reason why these bytes are not the trailer of a block of this key.
 * Under KVIO_VERIFY_OFF only the fields that locate the payload are checked. */
int kvio_trailer_parse(const uint8_t in[KVIO_TRAILER_BYTES], uint64_t file_nbytes,
		       const uint8_t key_hash[16], int verify, struct kvio_trailer *out)
{
	uint64_t room = file_nbytes - KVIO_TRAILER_BYTES;

	if (memcmp(in, MAGIC, 8))
		return KVIO_BAD_MAGIC;
	if (get_le(in + 8, 2) != VERSION || get_le(in + 10, 2) > FLAG_CHECKSUM)
		return KVIO_BAD_VERSION;
	if (verify != KVIO_VERIFY_OFF && kvio_crc32c(0, in, 60) != (uint32_t)get_le(in + 60, 4))
		return KVIO_BAD_TRAILER;
	out->flags = get_le(in + 10, 2) & FLAG_CHECKSUM ? KVIO_CHECKSUM : 0;
	out->crc = (uint32_t)get_le(in + 12, 4);
	out->nbytes = get_le(in + 16, 8);
	if (out->nbytes > room || room - out->nbytes >= KVIO_MAX_ALIGN)
		return KVIO_BAD_LENGTH;
	if (verify != KVIO_VERIFY_OFF && memcmp(in + 24, key_hash, 16))
		return KVIO_BAD_KEY;
	return 0;
}
