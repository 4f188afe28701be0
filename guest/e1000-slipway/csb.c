// SPDX-License-Identifier: GPL-2.0
/*
 * The communication status block (Speeding Up Packet I/O in Virtual Machines, section 3.5): memory
 * that the driver and the device share, with the tails and heads of the rings. The driver writes a
 * register (it "kicks") only if the device sleeps, and the device raises an interrupt only if the
 * driver sleeps. While both are busy there are neither exits nor interrupts.
 * spec/e1000-spec/src/csb.rs has the rules.
 *
 * Only the registers of the block are specific to the 82540EM.
 */
#include "slip.h"

#define CSB_SUBSYSTEM	0x5e10	/* the subsystem ID of a device that has a block */
#define CSB_ENABLE	BIT(0)
#define CSB_KICKS	BIT(1)	/* in CSBAL: the device is kicked by CSBK */
#define CSB_OFFLOADS	BIT(2)	/* received frames have a header, may lack checksums or be merged */

/* Each half is written by one side only, and is in cache lines of its own. */
struct slip_csb {
	/* Written by the driver. */
	__le32 tdt;
	__le32 rdt;
	__le32 want_tx;
	__le32 want_rx;
	__le32 unused1[12];
	/* Written by the device. */
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
 * Returns whether the stack accepts received frames without a checksum, and merged segments. Each
 * of the two is a feature of Linux that users can switch off.
 */
bool slip_csb_wants_offloads(struct slip_nic *nic)
{
	netdev_features_t both = NETIF_F_RXCSUM | NETIF_F_GRO_HW;

	return (nic->netdev->features & both) == both;
}

/*
 * Turns the block on if the device offers one and the user wants it. The device was reset before,
 * and uses no block yet. If there is no memory for a block, the driver works without.
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
	/* The device counts as asleep until it clears this. */
	nic->csb->need_tx_kick = cpu_to_le32(1);
	slip_set(nic, REG_CSBAH, upper_32_bits(nic->csb_dma));
	low = lower_32_bits(nic->csb_dma) | CSB_ENABLE;
	slip_set(nic, REG_CSBAL, slip_csb_wants_offloads(nic) ? low | CSB_OFFLOADS : low);
	/* What is read back says which bits the device supports. */
	low = slip_get(nic, REG_CSBAL);
	/* A hypervisor can turn a write of CSBK into an event, since its value does not matter. */
	nic->kick_register = low & CSB_KICKS ? REG_CSBK : REG_TDT;
	nic->header = low & CSB_OFFLOADS ? SLIP_HEADER : 0;
}

/* Frees the block. The device was reset before, so it uses the block no more. */
void slip_csb_free(struct slip_nic *nic)
{
	if (!nic->csb)
		return;
	dma_free_coherent(&nic->pdev->dev, sizeof(*nic->csb), nic->csb, nic->csb_dma);
	nic->csb = NULL;
}

/*
 * Returns the number of descriptors from the start of the ring up to index @at, over all laps. An
 * index alone does not tell one lap from another.
 */
static u32 slip_csb_count(const struct slip_tx *tx, u16 at)
{
	return tx->reclaimed + slip_steps(tx->clean, at, tx->count);
}

/*
 * Returns whether the last kick is still under way, so that no other one is needed: the device has
 * not reached the tail of that kick. When it does, it reads the tail once more before it sleeps,
 * and finds newer descriptors. A kick that was made in an earlier jiffy does not count, so that one
 * that was lost is repeated.
 */
static bool slip_csb_is_kicked(struct slip_nic *nic)
{
	u32 sent = slip_csb_count(&nic->tx, slip_csb_sent(nic));

	return nic->kicked && nic->kicked_at == jiffies && (s32)(nic->kicked_for - sent) > 0;
}

/*
 * Hands the device descriptors up to @tail. Returns whether the caller has to kick the device.
 */
bool slip_csb_send(struct slip_nic *nic, u16 tail)
{
	dma_wmb();	/* descriptors are written before the tail */
	WRITE_ONCE(nic->csb->tdt, cpu_to_le32(tail));
	/*
	 * Pairs with the device's barrier between its store of need_tx_kick and its last read of
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
 * Hands the device receive buffers up to @tail. The device reads the tail for each frame, so it is
 * never kicked for this.
 */
void slip_csb_receive(struct slip_nic *nic, u16 tail)
{
	dma_wmb();
	WRITE_ONCE(nic->csb->rdt, cpu_to_le32(tail));
}

/*
 * Returns the index of the first descriptor that the device has not sent. If the device's head is
 * not among the descriptors in flight, the device counts as having sent nothing.
 */
u16 slip_csb_sent(struct slip_nic *nic)
{
	const struct slip_tx *tx = &nic->tx;
	u32 head = le32_to_cpu(READ_ONCE(nic->csb->tdh));

	if (head >= tx->count ||
	    slip_steps(tx->clean, head, tx->count) > slip_steps(tx->clean, tx->next, tx->count))
		return tx->clean;
	dma_rmb();	/* the head is read before the descriptors that it frees */
	return head;
}

/* Asks for an interrupt for sent frames. The caller then has to look at the ring once more. */
void slip_csb_want_sent(struct slip_nic *nic)
{
	WRITE_ONCE(nic->csb->want_tx, cpu_to_le32(1));
	mb();	/* as in slip_csb_want() */
}

/*
 * Tells the device which interrupts the driver wants. The caller has to look at the rings once more
 * before it sleeps.
 */
void slip_csb_want(struct slip_nic *nic, bool sent, bool received)
{
	WRITE_ONCE(nic->csb->want_tx, cpu_to_le32(sent));
	WRITE_ONCE(nic->csb->want_rx, cpu_to_le32(received));
	/*
	 * Pairs with the device's barrier between its store of a head or descriptor and its read
	 * of want_tx and want_rx.
	 */
	mb();
}
