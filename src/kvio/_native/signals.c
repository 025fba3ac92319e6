/*
 * Handlers of signals during a long call.
 *
 * Python runs them only on its main thread, and never inside a call of C.  So a call on
 * that thread runs them every KVIO_HANDLERS_MS, and if one of them raises an exception it
 * ends early, between two operations.
 */
#include "kvio.h"

#include <pthread.h>
#include <time.h>

static pthread_t main_thread;
static int (*run_handlers)(void);

void kvio_handle_signals(unsigned long thread, int (*run)(void))
{
	main_thread = (pthread_t)thread;
	run_handlers = run;
}

static int64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &t);	/* 6 ns; right to a tick of the kernel */
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void kvio_let_handlers_run(kvio_call *call)
{
	int64_t now;

	if (!run_handlers || !pthread_equal(pthread_self(), main_thread))
		return;
	now = now_ms();
	if (!call->handled_ms)
		call->handled_ms = now;
	if (now - call->handled_ms < KVIO_HANDLERS_MS)
		return;
	if (run_handlers())
		__atomic_store_n(&call->cancel, 1, __ATOMIC_RELEASE);
	call->handled_ms = now_ms();
}
