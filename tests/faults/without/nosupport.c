/*
 * Run a program as if the kernel or its file systems lacked some calls: a seccomp
 * filter that every child inherits, written as BPF by hand (seccomp(2)).
 *
 *   nosupport REFUSAL[,REFUSAL...] PROGRAM [ARGUMENT...]
 *
 * A filter sees numbers, not what pointers point at: O_TMPFILE in openat2(2) would
 * pass, so openat2 is refused as a whole.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "no filter is known for this processor"
#endif

#define TMPFILE_BIT ((unsigned int)(O_TMPFILE & ~O_DIRECTORY))
#define ALL_BITS 0xffffffffu
#define MOST 256

/* A call fails with error if an argument, masked, has (or has not) a value. */
struct refusal {
	const char *name;
	unsigned int call, argument, mask, value;
	int unequal;
	unsigned int error;
};

static const struct refusal refusals[] = {
	{ "tmpfile", __NR_openat, 2, TMPFILE_BIT, TMPFILE_BIT, 0, EOPNOTSUPP },
#ifdef __NR_open
	{ "tmpfile", __NR_open, 1, TMPFILE_BIT, TMPFILE_BIT, 0, EOPNOTSUPP },
#endif
	{ "tmpfile", __NR_openat2, 0, 0, 0, 0, ENOSYS },
	{ "empty-path", __NR_linkat, 4, AT_EMPTY_PATH, AT_EMPTY_PATH, 0, ENOENT },
	{ "follow", __NR_linkat, 4, AT_SYMLINK_FOLLOW, AT_SYMLINK_FOLLOW, 0, ENOENT },
	{ "rename-flags", __NR_renameat2, 4, ALL_BITS, 0, 1, EINVAL },
	{ "openat2", __NR_openat2, 0, 0, 0, 0, ENOSYS },
	{ "io-uring", __NR_io_uring_setup, 0, 0, 0, 0, ENOSYS },
	{ "rwf-flags", __NR_preadv2, 5, ALL_BITS, 0, 1, EOPNOTSUPP },
	{ "rwf-flags", __NR_pwritev2, 5, ALL_BITS, 0, 1, EOPNOTSUPP },
	{ "vectors2", __NR_preadv2, 0, 0, 0, 0, ENOSYS },
	{ "vectors2", __NR_pwritev2, 0, 0, 0, 0, ENOSYS },
	{ "statx", __NR_statx, 0, 0, 0, 0, ENOSYS },
	{ "copy-range", __NR_copy_file_range, 0, 0, 0, 0, EXDEV },
	{ "cachestat", 451, 0, 0, 0, 0, ENOSYS },
	{ "fallocate", __NR_fallocate, 0, 0, 0, 0, EOPNOTSUPP },
	{ "sync-range", __NR_sync_file_range, 0, 0, 0, 0, ENOSYS },
	{ "memfd", __NR_memfd_create, 0, 0, 0, 0, ENOSYS },
};

static struct sock_filter program[MOST];
static unsigned short length;

static void emit(unsigned int code, unsigned int k, int if_true, int if_false)
{
	struct sock_filter one = { (unsigned short)code, (unsigned char)if_true,
				   (unsigned char)if_false, k };

	if (length < MOST)
		program[length++] = one;
}

static void refuse(const struct refusal *r)
{
	unsigned int low = (unsigned int)(offsetof(struct seccomp_data, args) + 8u * r->argument);

	emit(BPF_LD | BPF_W | BPF_ABS, (unsigned int)offsetof(struct seccomp_data, nr), 0, 0);
	emit(BPF_JMP | BPF_JEQ | BPF_K, r->call, 0, 4);
	emit(BPF_LD | BPF_W | BPF_ABS, low, 0, 0);
	emit(BPF_ALU | BPF_AND | BPF_K, r->mask, 0, 0);
	emit(BPF_JMP | BPF_JEQ | BPF_K, r->value, r->unequal, !r->unequal);
	emit(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | r->error, 0, 0);
}

static int refuse_named(const char *name, size_t nbytes)
{
	int found = 0;

	for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++)
		if (strlen(refusals[i].name) == nbytes && !strncmp(refusals[i].name, name, nbytes)) {
			refuse(&refusals[i]);
			found = 1;
		}
	if (!found)
		fprintf(stderr, "nosupport: no refusal %.*s\n", (int)nbytes, name);
	return found;
}

int main(int argc, char **argv)
{
	struct sock_fprog filter = { 0, program };
	const char *name;

	if (argc < 3) {
		fprintf(stderr, "usage: %s REFUSAL[,REFUSAL...] PROGRAM [ARGUMENT...]\n", argv[0]);
		return 2;
	}
	emit(BPF_LD | BPF_W | BPF_ABS, (unsigned int)offsetof(struct seccomp_data, arch), 0, 0);
	emit(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0);
	emit(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
	for (name = argv[1]; *name; name += *name == ',') {
		size_t nbytes = strcspn(name, ",");

		if (!refuse_named(name, nbytes))
			return 2;
		name += nbytes;
	}
	emit(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
	filter.len = length;
	if (length == MOST || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) {
		fprintf(stderr, "nosupport: cannot install the filter: %s\n", strerror(errno));
		return 2;
	}
	execvp(argv[2], argv + 2);
	fprintf(stderr, "nosupport: %s: %s\n", argv[2], strerror(errno));
	return 2;
}
