// The baselines of `benchmarks.scenarios.tmpfile`: threads that write one fresh file each, by a C++
// stream, by C stdio or by write(2), and publish it by rename(2) or by linkat(2).
//
//   filewriter DIRECTORY PREFIX THREADS FILE_BYTES WRITER CALL_BYTES PUBLISH SYNC < SOURCE
//
//   WRITER      ofstream | fwrite | write; the first two with a buffer of 1 MiB
//   CALL_BYTES  handed over in one call; 0: the whole file
//   PUBLISH     rename: a named temporary | tmpfile: O_TMPFILE and /proc/self/fd
//   SYNC        none | durable: fdatasync(2) of the file before, fsync(2) of the directory after
//
// Thread i writes bytes i * FILE_BYTES and following of SOURCE, a file that is read into memory
// before the clock starts, to DIRECTORY/PREFIX-i (four digits or more), mode 0600. All threads
// start together. Standard output gets a line a file, in nanoseconds: opening and writing,
// syncing, publishing, and all of it with closing; then the time from the first start to the last
// end. Exit status 1 and "error ERRNO STEP" instead, if anything fails.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kHugePage = 2 * kMiB;

struct Options {
    std::string directory;
    std::string prefix;
    std::size_t threads;
    std::size_t file_bytes;
    std::string writer;
    std::size_t call_bytes;
    bool anonymous;
    bool durable;
};

struct Times {
    Clock::time_point start, written, synced, published, directory_synced, end;
};

// Another thread may be writing: nothing is unwound, the directory is the caller's to remove.
[[noreturn]] void fail(const char *step, int number = errno) {
    std::printf("error %d %s\n", number ? number : EIO, step);
    std::fflush(stdout);
    _exit(1);
}

struct Free {
    void operator()(char *base) const { std::free(base); }
};
using Memory = std::unique_ptr<char, Free>;

// Memory as kvio gives it: huge pages make direct I/O and faults cheaper, so all have the same.
Memory allocate(std::size_t nbytes) {
    const std::size_t rounded = (nbytes + kHugePage - 1) / kHugePage * kHugePage;
    void *base = std::aligned_alloc(kHugePage, std::max(rounded, kHugePage));
    if (base == nullptr) fail("allocate", ENOMEM);
    madvise(base, rounded, MADV_HUGEPAGE);
    return Memory(static_cast<char *>(base));
}

Memory read_source(std::size_t nbytes) {
    Memory source = allocate(nbytes);
    for (std::size_t done = 0; done < nbytes;) {
        const ssize_t got =
            pread(STDIN_FILENO, source.get() + done, nbytes - done, static_cast<off_t>(done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) fail("read the source");
        if (got == 0) fail("read the source: too short", ENODATA);
        done += static_cast<std::size_t>(got);
    }
    return source;
}

void sync_or_fail(int result, const char *step) {
    if (result != 0) fail(step);
}

// The three writers: when they return, the kernel has every byte, but no disk need.

void write_by_stream(const std::string &path, const char *data, std::size_t nbytes,
                     std::size_t call_bytes, char *buffer) {
    std::ofstream out;
    errno = 0;
    out.rdbuf()->pubsetbuf(buffer, kMiB);
    out.open(path, std::ios::binary | std::ios::trunc);
    if (!out) fail("open a stream");
    for (std::size_t done = 0; done < nbytes;) {
        const std::size_t count = std::min(call_bytes, nbytes - done);
        if (!out.write(data + done, static_cast<std::streamsize>(count))) fail("write to a stream");
        done += count;
    }
    out.close();
    if (!out) fail("close a stream");
}

void write_by_stdio(int fd, const char *data, std::size_t nbytes, std::size_t call_bytes,
                    char *buffer) {
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);  // fclose closes it; fd is still to be linked
    if (own < 0) fail("dup");
    std::FILE *out = fdopen(own, "wb");
    if (out == nullptr) fail("fdopen");
    if (std::setvbuf(out, buffer, _IOFBF, kMiB) != 0) fail("setvbuf");
    for (std::size_t done = 0; done < nbytes;) {
        const std::size_t count = std::min(call_bytes, nbytes - done);
        if (std::fwrite(data + done, 1, count, out) != count) fail("fwrite");
        done += count;
    }
    if (std::fflush(out) != 0) fail("fflush");
    if (std::fclose(out) != 0) fail("fclose");
}

void write_by_call(int fd, const char *data, std::size_t nbytes, std::size_t call_bytes) {
    for (std::size_t done = 0; done < nbytes;) {
        const ssize_t count = write(fd, data + done, std::min(call_bytes, nbytes - done));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) fail("write");
        if (count == 0) fail("write: nothing was written", EIO);
        done += static_cast<std::size_t>(count);
    }
}

class Writer {
public:
    Writer(const Options &options, std::size_t index, const char *source)
        : options_(options), data_(source + index * options.file_bytes), buffer_(allocate(kMiB)) {
        char number[24];
        std::snprintf(number, sizeof number, "%04zu", index);
        const std::string name = options.prefix + "-" + number;
        path_ = options.directory + "/" + name;
        temporary_ = options.directory + "/." + name + ".tmp";
        std::memset(buffer_.get(), 0, kMiB);  // its page faults are not what is timed
        directory_ = open(options.directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (directory_ < 0) fail("open the directory");
    }

    void run() {
        times.start = Clock::now();
        open_file();
        write_file();
        times.written = Clock::now();
        // On the descriptor that was open before the first byte: it sees every write error.
        if (options_.durable) sync_or_fail(fdatasync(file_), "fdatasync");
        times.synced = Clock::now();
        publish();
        times.published = Clock::now();
        if (options_.durable) sync_or_fail(fsync(directory_), "fsync of the directory");
        times.directory_synced = Clock::now();
        if (close(file_) != 0) fail("close");
        times.end = Clock::now();
    }

    Times times;

private:
    void open_file() {
        if (options_.anonymous) {
            const int flags = O_TMPFILE | O_WRONLY | O_CLOEXEC;
            file_ = open(options_.directory.c_str(), flags, 0600);
            if (file_ < 0) fail("open O_TMPFILE");
        } else {
            const int flags = O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC;
            file_ = open(temporary_.c_str(), flags, 0600);
            if (file_ < 0) fail("open a temporary");
        }
    }

    void write_file() {
        const std::size_t nbytes = options_.file_bytes;
        const std::size_t call_bytes = options_.call_bytes ? options_.call_bytes : nbytes;
        if (options_.writer == "ofstream") {
            // A stream has no descriptor to sync or to link: it opens the file a second time.
            const std::string path = options_.anonymous ? proc_path() : temporary_;
            write_by_stream(path, data_, nbytes, call_bytes, buffer_.get());
        } else if (options_.writer == "fwrite") {
            write_by_stdio(file_, data_, nbytes, call_bytes, buffer_.get());
        } else {
            write_by_call(file_, data_, nbytes, call_bytes);
        }
    }

    void publish() {
        if (!options_.anonymous) {
            if (rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
            return;
        }
        const std::string from = proc_path();
        if (linkat(AT_FDCWD, from.c_str(), AT_FDCWD, path_.c_str(), AT_SYMLINK_FOLLOW) != 0)
            fail("linkat");
    }

    std::string proc_path() const { return "/proc/self/fd/" + std::to_string(file_); }

    const Options &options_;
    const char *data_;
    Memory buffer_;
    std::string path_, temporary_;
    int directory_ = -1;
    int file_ = -1;
};

long long between(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count();
}

void report(const std::vector<Writer> &writers) {
    Clock::time_point first = writers.front().times.start, last = writers.front().times.end;
    for (const Writer &writer : writers) {
        const Times &t = writer.times;
        std::printf("file %lld %lld %lld %lld\n", between(t.start, t.written),
                    between(t.written, t.synced) + between(t.published, t.directory_synced),
                    between(t.synced, t.published), between(t.start, t.end));
        first = std::min(first, t.start);
        last = std::max(last, t.end);
    }
    std::printf("wall %lld\n", between(first, last));
    if (std::fflush(stdout) != 0) _exit(1);
}

void write_files(const Options &options) {
    const Memory source = read_source(options.threads * options.file_bytes);
    std::vector<Writer> writers;
    writers.reserve(options.threads);
    for (std::size_t i = 0; i < options.threads; ++i) writers.emplace_back(options, i, source.get());

    pthread_barrier_t barrier;
    const auto count = static_cast<unsigned>(options.threads);
    if (const int number = pthread_barrier_init(&barrier, nullptr, count); number != 0)
        fail("pthread_barrier_init", number);
    std::vector<std::thread> threads;
    for (Writer &writer : writers) {
        threads.emplace_back([&writer, &barrier] {
            pthread_barrier_wait(&barrier);
            writer.run();
        });
    }
    for (std::thread &thread : threads) thread.join();
    report(writers);
}

std::size_t number_or_usage(const char *text) {
    char *end = nullptr;
    errno = 0;
    const unsigned long long value = std::strtoull(text, &end, 10);
    if (errno != 0 || *text == '\0' || *end != '\0') fail("usage: not a number", EINVAL);
    return static_cast<std::size_t>(value);
}

Options parse(char **argv) {
    const std::string writer = argv[5], publish = argv[7], sync = argv[8];
    const bool known = (writer == "ofstream" || writer == "fwrite" || writer == "write") &&
                       (publish == "rename" || publish == "tmpfile") &&
                       (sync == "none" || sync == "durable");
    Options options{argv[1], argv[2], number_or_usage(argv[3]), number_or_usage(argv[4]),
                    writer,  number_or_usage(argv[6]), publish == "tmpfile", sync == "durable"};
    if (!known || options.threads == 0 || options.file_bytes == 0) fail("usage", EINVAL);
    return options;
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 9) fail("usage", EINVAL);
    umask(0077);  // 0600 at most, whoever creates a file
    try {
        write_files(parse(argv));
    } catch (const std::exception &) {  // no more memory or threads
        fail("start", EAGAIN);
    }
    return 0;
}
