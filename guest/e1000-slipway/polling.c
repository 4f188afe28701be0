// SPDX-License-Identifier: GPL-2.0
/*
 * Polling with feedback, as FreeBSD's device polling has it (Speeding Up Packet I/O in Virtual
 * Machines, sections 3.3.2 and 3.4): frames do not interrupt. A timer's ticks have the rings
 * looked at, for a number of frames that follows the time which they take. So a set share of the
 * processor is left to processes whatever the offered load, and what they cannot take is lost in
 * the ring, where it has cost the guest nothing.
 */
#include <linux/kthread.h>
#include <linux/moduleparam.h>
#include <linux/sched/clock.h>
#include <linux/tick.h>

#include "slip.h"

/*
 * Fewest frames of a tick: a guest that is slow for another reason than frames goes on receiving.
 */
#define BURST_LEAST	16
/* Intervals that a tick counts for at most. */
#define TICK_LONGEST	8

static unsigned int poll_usecs = 500;
module_param(poll_usecs, uint, 0644);
MODULE_PARM_DESC(poll_usecs, "microseconds between ticks of polling, 50 or more (default: 500)");

/*
 * The stack takes about a quarter of what a small datagram costs, and the process that receives it
 * the rest. With a greater share, frames are taken that no process has the time for; with a smaller
 * one, processes leave time that is the frames', too.
 */
static unsigned int poll_share = 20;
module_param(poll_share, uint, 0644);
MODULE_PARM_DESC(poll_share,
		 "percent of a busy processor that frames may take in polling (default: 20)");

static bool poll_idle;
module_param(poll_idle, bool, 0644);
MODULE_PARM_DESC(poll_idle,
		 "polling: look at the rings whenever no process wants the processor, too (default: off)");

static u64 slip_poll_interval(void)
{
	return max(poll_usecs, 50U) * (u64)NSEC_PER_USEC;
}

/* Time that this processor has idled since the last tick, in nanoseconds. */
static u64 slip_poll_idled(struct slip_polling *polling)
{
	u64 idle = get_cpu_idle_time_us(smp_processor_id(), NULL);
	u64 idled = idle - polling->idle;

	polling->idle = idle;
	/* A tick on another processor, or a kernel that does not count. */
	return idled <= USEC_PER_SEC ? idled * NSEC_PER_USEC : 0;
}

/*
 * Begins a tick. Its frames' share is of the time since the last one, which is longer than the
 * interval where a guest is without its processor for a while. Time that no process wanted is
 * theirs, too.
 */
static void slip_poll_begin(struct slip_polling *polling)
{
	u64 now = local_clock();
	u64 passed = clamp_t(u64, now - polling->since, slip_poll_interval(),
			     TICK_LONGEST * slip_poll_interval());
	u64 idled = min(slip_poll_idled(polling), passed);

	polling->share = idled + div_u64((passed - idled) * min(poll_share, 100U), 100);
	polling->since = now;
	polling->left = polling->burst;
	polling->used = 0;
	polling->is_tick = true;
}

/* A tick that comes while the poll of the last one goes on is that one's. */
static enum hrtimer_restart slip_poll_tick(struct hrtimer *timer)
{
	struct slip_polling *polling = container_of(timer, struct slip_polling, timer);
	struct slip_nic *nic = container_of(polling, struct slip_nic, polling);

	if (napi_schedule_prep(&nic->napi)) {
		slip_poll_begin(polling);
		__napi_schedule(&nic->napi);
	}
	hrtimer_forward_now(timer, ns_to_ktime(slip_poll_interval()));
	return HRTIMER_RESTART;
}

/*
 * The idle loop's polling: a thread of the lowest priority that a module can set. A busy process leaves
 * it about 1.5 % of its processor. It never sleeps, so the guest never idles, and a tick finds no idle
 * time to use: its share is poll_share.
 */
static int slip_poll_idly(void *data)
{
	struct slip_nic *nic = data;

	set_user_nice(current, MAX_NICE);
	while (!kthread_should_stop()) {
		local_bh_disable();
		if (napi_schedule_prep(&nic->napi)) {
			nic->polling.left = NAPI_POLL_WEIGHT;
			nic->polling.used = 0;
			nic->polling.is_tick = false;
			nic->stats.idle_polls++;
			__napi_schedule(&nic->napi);
		}
		local_bh_enable();	/* the poll is here */
		cond_resched();
	}
	return 0;
}

static void slip_poll_start_idle(struct slip_nic *nic)
{
	struct task_struct *idler;

	if (!poll_idle)
		return;
	idler = kthread_run(slip_poll_idly, nic, "%s-idle", nic->netdev->name);
	if (IS_ERR(idler))
		netdev_warn(nic->netdev, "no polling in the idle loop: %ld\n", PTR_ERR(idler));
	else
		nic->polling.idler = idler;
}

/* Starts ticks, if the user wants polling. NAPI is enabled. */
void slip_polling_start(struct slip_nic *nic)
{
	struct slip_polling *polling = &nic->polling;

	if (!(nic->flags & SLIP_FLAG_POLL))
		return;
	polling->burst = BURST_LEAST;
	polling->since = local_clock();
	hrtimer_init(&polling->timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL);
	polling->timer.function = slip_poll_tick;
	hrtimer_start(&polling->timer, ns_to_ktime(slip_poll_interval()), HRTIMER_MODE_REL);
	slip_poll_start_idle(nic);
}

void slip_polling_stop(struct slip_nic *nic)
{
	struct task_struct *idler = nic->polling.idler;

	if (!(nic->flags & SLIP_FLAG_POLL))
		return;
	hrtimer_cancel(&nic->polling.timer);
	nic->polling.idler = NULL;
	if (idler)
		kthread_stop(idler);
}

/*
 * Follows the time that a tick's frames took: fewer of them next time if it was more than their
 * share, more if it was less and some were left.
 */
static void slip_poll_adapt(struct slip_nic *nic, bool more)
{
	struct slip_polling *polling = &nic->polling;

	if (polling->used > polling->share)
		polling->burst = max_t(u32, polling->burst - polling->burst / 8, BURST_LEAST);
	else if (more)
		polling->burst = min_t(u32, polling->burst + polling->burst / 8, nic->rx.count);
}

/* One call of NAPI: a part of a tick's frames. */
int slip_polling_poll(struct slip_nic *nic, int budget)
{
	struct slip_polling *polling = &nic->polling;
	int most = min_t(int, budget, polling->left);
	u64 since = local_clock();
	int frames;

	slip_tx_poll(nic, budget);
	if (!budget)
		return 0;	/* netpoll wants room to send, and no frames */
	frames = slip_rx_poll(nic, most);
	polling->left -= frames;
	polling->used += local_clock() - since;
	if (frames == budget && polling->left)
		return budget;
	if (polling->is_tick)
		slip_poll_adapt(nic, !polling->left);
	/* NAPI takes a full budget for more to do. */
	frames = min(frames, budget - 1);
	napi_complete_done(&nic->napi, frames);
	return frames;
}
