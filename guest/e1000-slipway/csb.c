// SPDX-License-Identifier: GPL-2.0
/*
 * The communication status block (Speeding Up Packet I/O in Virtual Machines, section 3.5): tails
 * and heads in memory that driver and device share. A register is written for a device that
 * sleeps, and an interrupt comes for a driver that sleeps; while both are busy there are neither
 * exits nor interrupts. spec/e1000-spec/src/csb.rs has the rules.
 *
 * Nothing in here is about the 82540EM but the registers of the block.
 */
#include "slip.h"

#define CSB_SUBSYSTEM	0x5e10	/* the subsystem ID of a device that has a block */
#define CSB_ENABLE	BIT(0)
#define CSB_KICKS	BIT(1)	/* in CSBAL, of a device that is kicked by CSBK */
#define CSB_OFFLOADS	BIT(2)	/* received frames have a header, and may have work left */

/* Each half has a writer of its own, and cache lines of its own. */
struct slip_csb {
	/* The driver's. */
	__le32 tdt;
	__le32 rdt;
	__le32 want_tx;
	__le32 want_rx;
	__le32 unused1[12];
	/* The device's. */
	__le32 tdh;
	__le32 rdh;
	__le32 need_tx_kick;
	__le32 need_rx_kick;
	__le32 unused2[12];
};

bool slip_csb_offered(struct slip_nic *nic)
{
	return nic->pdev->subsystem_device == CSB_SUBSYSTEM;
}

/*
 * Returns whether the stack takes frames that lack their checksum, and whole segments. Linux has a
 * feature for either.
 */
bool slip_csb_wants_offloads(struct slip_nic *nic)
{
	netdev_features_t both = NETIF_F_RXCSUM | NETIF_F_GRO_HW;

	return (nic->netdev->features & both) == both;
}

/*
 * Turns the block on, if the device has one and the user wants it. The device was reset: it looks
 * at no block. Without memory for it the driver does without.
 */
void slip_csb_start(struct slip_nic *nic)
{
	u32 low;

	BUILD_BUG_ON(sizeof(struct slip_csb) != 128);
	nic->header = 0;
	if (!(nic->flags & SLIP_FLAG_CSB) || !slip_csb_offered(nic))
		return;
	nic->csb = dma_alloc_coherent(&nic->pdev->dev, sizeof(*nic->csb), &nic->csb_dma,
				      GFP_KERNEL);
	if (!nic->csb)
		return;
	memset(nic->csb, 0, sizeof(*nic->csb));
	nic->kicked = false;
	/* Until the device says otherwise it sleeps. */
	nic->csb->need_tx_kick = cpu_to_le32(1);
	slip_set(nic, REG_CSBAH, upper_32_bits(nic->csb_dma));
	low = lower_32_bits(nic->csb_dma) | CSB_ENABLE;
	slip_set(nic, REG_CSBAL, slip_csb_wants_offloads(nic) ? low | CSB_OFFLOADS : low);
	/* The device says what it can. */
	low = slip_get(nic, REG_CSBAL);
	/* A hypervisor can take a write of CSBK for an event, and need not look at its value. */
	nic->kick_register = low & CSB_KICKS ? REG_CSBK : REG_TDT;
	nic->header = low & CSB_OFFLOADS ? SLIP_HEADER : 0;
}

/* Frees the block. The device was reset. */
void slip_csb_free(struct slip_nic *nic)
{
	if (!nic->csb)
		return;
	dma_free_coherent(&nic->pdev->dev, sizeof(*nic->csb), nic->csb, nic->csb_dma);
	nic->csb = NULL;
}

/* Descriptors up to the place @at since the ring began: a place alone is the same in each lap. */
static u32 slip_csb_count(const struct slip_tx *tx, u16 at)
{
	return tx->reclaimed + slip_steps(tx->clean, at, tx->count);
}

/*
 * Returns whether the last kick is still on its way: the device has not come to the tail that was
 * kicked for. It looks at the tail once more behind that, before it sleeps. A kick of an earlier
 * tick is repeated, whatever became of it.
 */
static bool slip_csb_is_kicked(struct slip_nic *nic)
{
	u32 sent = slip_csb_count(&nic->tx, slip_csb_sent(nic));

	return nic->kicked && nic->kicked_at == jiffies && (s32)(nic->kicked_for - sent) > 0;
}

/*
 * Hands over descriptors up to @tail. Returns whether the device has to be woken by the register,
 * too.
 */
bool slip_csb_send(struct slip_nic *nic, u16 tail)
{
	dma_wmb();	/* descriptors before the tail */
	WRITE_ONCE(nic->csb->tdt, cpu_to_le32(tail));
	/*
	 * Pairs with the device's barrier between its store of need_tx_kick and its last look at
	 * the tail.
	 */
	mb();
	if (!READ_ONCE(nic->csb->need_tx_kick)) {
		nic->kicked = false;
		return false;
	}
	if (slip_csb_is_kicked(nic))
		return false;
	nic->kicked = true;
	nic->kicked_for = slip_csb_count(&nic->tx, tail);
	nic->kicked_at = jiffies;
	return true;
}

/*
 * Hands over receive buffers up to @tail. The device looks at the tail for each frame: it is
 * never woken.
 */
void slip_csb_receive(struct slip_nic *nic, u16 tail)
{
	dma_wmb();
	WRITE_ONCE(nic->csb->rdt, cpu_to_le32(tail));
}

/*
 * Returns the first descriptor that the device has not sent. A place where none is in flight is
 * taken for no progress.
 */
u16 slip_csb_sent(struct slip_nic *nic)
{
	const struct slip_tx *tx = &nic->tx;
	u32 head = le32_to_cpu(READ_ONCE(nic->csb->tdh));

	if (head >= tx->count ||
	    slip_steps(tx->clean, head, tx->count) > slip_steps(tx->clean, tx->next, tx->count))
		return tx->clean;
	dma_rmb();	/* the head before what it says is done */
	return head;
}

/* Asks for an interrupt for sent frames. The caller looks at the ring once more. */
void slip_csb_want_sent(struct slip_nic *nic)
{
	WRITE_ONCE(nic->csb->want_tx, cpu_to_le32(1));
	mb();	/* as in slip_csb_want() */
}

/* Says which interrupts are wanted. The caller looks at the rings once more before it sleeps. */
void slip_csb_want(struct slip_nic *nic, bool sent, bool received)
{
	WRITE_ONCE(nic->csb->want_tx, cpu_to_le32(sent));
	WRITE_ONCE(nic->csb->want_rx, cpu_to_le32(received));
	/*
	 * Pairs with the device's barrier between its store of a head or descriptor and its look
	 * at the words.
	 */
	mb();
}
