/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The driver of one controller: what its files share.
 *
 * main.c has the life of the device, interrupts and NAPI; hw.c registers; tx.c and rx.c the
 * rings; csb.c the communication status block, polling.c ticks in place of interrupts; ethtool.c
 * what users ask and set, selftest.c its test.
 *
 * Who may touch what: the transmit ring is its queue's lock's (the stack holds it around
 * slip_xmit(), the poll takes it); the receive ring is the poll's; everything else is under RTNL.
 */
#ifndef SLIP_H
#define SLIP_H

#include <linux/completion.h>
#include <linux/ethtool.h>
#include <linux/hrtimer.h>
#include <linux/io.h>
#include <linux/netdevice.h>
#include <linux/pci.h>

#include "hw.h"

#define SLIP_NAME	"e1000-slipway"

/* A ring's descriptors: a multiple of 8, as RDLEN and TDLEN count 128 bytes. */
#define SLIP_RING_MIN		64
#define SLIP_RING_MAX		4096
#define SLIP_RING_DEFAULT	256

/*
 * The longest frame is 0x3f00 bytes, so that it fits the transmitter's share of the packet
 * buffer.
 */
#define SLIP_MTU_MAX	(0x3f00 - ETH_HLEN - ETH_FCS_LEN)

/* The longest headers that the device changes: 8 bits in a context, and a tag beside them. */
#define SLIP_HEADERS_MAX	240

/* Bytes in front of a received frame, if the block says that there are any. */
#define SLIP_HEADER		16

/*
 * What a driver can do beyond the documented controller; private flags of ethtool, in this order.
 */
#define SLIP_FLAG_COMBINE	BIT(0)
#define SLIP_FLAG_LAZY		BIT(1)
#define SLIP_FLAG_CSB		BIT(2)
#define SLIP_FLAG_POLL		BIT(3)
#define SLIP_FLAGS		4

#define SLIP_TESTS	5

struct slip_csb;

/*
 * A transmit descriptor's memory. The skb is at the frame's last descriptor, so it is freed after
 * all others.
 */
struct slip_tx_slot {
	struct sk_buff *skb;
	dma_addr_t dma;
	u32 len;	/* 0: nothing is mapped */
	bool page;
};

struct slip_tx {
	struct slip_desc *ring;
	dma_addr_t dma;
	struct slip_tx_slot *slots;
	u16 count;
	u16 next;	/* the first free descriptor */
	u16 clean;	/* the first that was not reclaimed */
	u32 reclaimed;	/* descriptors since the ring began, modulo 2^32 */
	u16 told;	/* the tail that the device knows */
	u16 unreported;	/* descriptors since the last that reports */
	/* Places of descriptors that report, oldest first: a ring with as many entries. */
	u16 *reports;
	u16 report_first;
	u16 report_next;
	struct slip_desc context;	/* the one that the device has */
	/*
	 * Send combining: frames of the current window, and whether those of the last one came
	 * fast.
	 */
	unsigned long window;
	unsigned int window_frames;
	bool fast;
};

struct slip_rx_slot {
	void *buffer;
	dma_addr_t dma;
};

struct slip_rx {
	struct slip_desc *ring;
	dma_addr_t dma;
	struct slip_rx_slot *slots;
	u16 count;
	u16 next;	/* the next descriptor to look at */
	u16 fill;	/* the next descriptor without a buffer */
	struct sk_buff *skb;	/* a frame whose last buffer is still to come */
	struct sk_buff *last;	/* itself, or the last of its list: one has few fragments */
	bool drop;	/* the rest of the frame at hand is dropped */
};

/* Counts for ethtool -S, in the order of slip_stat_names. */
struct slip_stats {
	u64 interrupts;
	u64 polls;
	u64 tdt_writes;	/* and of CSBK */
	u64 tdt_combined;
	u64 csb_tails;
	u64 rdt_writes;
	u64 tx_stopped;
	u64 tx_contexts;
	u64 tx_checksums;
	u64 tx_segmented;
	u64 rx_checksums_good;
	u64 rx_checksums_bad;
	u64 rx_no_memory;
	u64 rx_segments;	/* that came whole */
	u64 idle_polls;	/* those of the idle loop */
};

struct slip_polling {
	struct hrtimer timer;
	u32 burst;	/* frames of a tick */
	u32 left;	/* of the tick at hand */
	u64 since;	/* when it began, in nanoseconds */
	u64 used;	/* nanoseconds that its frames took */
	u64 share;	/* that they should take at most */
	u64 idle;	/* idle time of its processor at the last tick, microseconds since boot */
	bool is_tick;	/* the poll at hand is a tick's, not the idle loop's */
	struct task_struct *idler;	/* NULL: the idle loop does not poll */
};

struct slip_nic {
	void __iomem *registers;
	struct net_device *netdev;
	struct pci_dev *pdev;
	struct napi_struct napi;
	struct slip_tx tx;
	struct slip_rx rx;
	struct slip_csb *csb;	/* NULL: not in use */
	dma_addr_t csb_dma;
	u32 header;		/* bytes in front of each received frame */
	u32 kick_register;	/* by whose write the device is woken, with the block */
	/*
	 * With the block: a kick that the device may not have noticed yet, the descriptors up to
	 * its tail since the ring began, and its time.
	 */
	bool kicked;
	u32 kicked_for;
	unsigned long kicked_at;
	bool runs;	/* the rings are the device's; changes under the address lock, too */
	u32 flags;
	u32 itr;		/* of ITR_UNIT_NS */
	u32 mta[MTA_WORDS];	/* what the device has: a write costs an exit */
	struct slip_stats stats;
	atomic64_t missed;
	struct work_struct restart;
	struct slip_polling polling;
	/* Of the self test. */
	struct completion tested;
	atomic_t looped;
};

static inline u32 slip_get(struct slip_nic *nic, u32 offset)
{
	return readl(nic->registers + offset);
}

static inline void slip_set(struct slip_nic *nic, u32 offset, u32 value)
{
	writel(value, nic->registers + offset);
}

/* The place behind @at in a ring. */
static inline u16 slip_after(u16 at, u16 count)
{
	return at + 1 == count ? 0 : at + 1;
}

/* Steps from one place of a ring to another. */
static inline u16 slip_steps(u16 from, u16 to, u16 count)
{
	return to >= from ? to - from : to + count - from;
}

static inline u16 slip_tx_free(const struct slip_tx *tx)
{
	return tx->count - 1 - slip_steps(tx->clean, tx->next, tx->count);
}

/* main.c */
extern unsigned int slip_combine_rate;
int slip_up(struct slip_nic *nic);
void slip_down(struct slip_nic *nic);
void slip_check_link(struct slip_nic *nic);

/* hw.c */
bool slip_reset(struct slip_nic *nic);
bool slip_eeprom_read(struct slip_nic *nic, u16 words[EEPROM_WORDS]);
void slip_read_address(struct slip_nic *nic);
void slip_set_filter(struct slip_nic *nic);
void slip_set_mode(struct slip_nic *nic);

/* tx.c */
int slip_tx_alloc(struct slip_nic *nic);
void slip_tx_release(struct slip_nic *nic);
void slip_tx_start(struct slip_nic *nic);
void slip_tx_poll(struct slip_nic *nic, int budget);
netdev_tx_t slip_xmit(struct sk_buff *skb, struct net_device *netdev);

/* rx.c */
int slip_rx_alloc(struct slip_nic *nic);
void slip_rx_release(struct slip_nic *nic);
void slip_rx_start(struct slip_nic *nic);
int slip_rx_poll(struct slip_nic *nic, int budget);
bool slip_rx_starves(struct slip_nic *nic);
bool slip_rx_waits(struct slip_nic *nic);

/* csb.c */
bool slip_csb_offered(struct slip_nic *nic);
bool slip_csb_wants_offloads(struct slip_nic *nic);
void slip_csb_start(struct slip_nic *nic);
void slip_csb_free(struct slip_nic *nic);
bool slip_csb_send(struct slip_nic *nic, u16 tail);
void slip_csb_receive(struct slip_nic *nic, u16 tail);
u16 slip_csb_sent(struct slip_nic *nic);
void slip_csb_want_sent(struct slip_nic *nic);
void slip_csb_want(struct slip_nic *nic, bool sent, bool received);

/* polling.c */
void slip_polling_start(struct slip_nic *nic);
void slip_polling_stop(struct slip_nic *nic);
int slip_polling_poll(struct slip_nic *nic, int budget);

/* selftest.c */
extern const char slip_test_names[SLIP_TESTS][ETH_GSTRING_LEN];
void slip_self_test(struct net_device *netdev, struct ethtool_test *test, u64 *failed);

/* ethtool.c */
extern const struct ethtool_ops slip_ethtool_ops;

#endif
