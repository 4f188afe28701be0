// SPDX-License-Identifier: GPL-2.0
/*
 * ethtool -t: registers, EEPROM, interrupts, loopback, link. All but the last need the interface
 * for themselves.
 */
#include <linux/delay.h>
#include <linux/etherdevice.h>
#include <linux/ethtool.h>
#include <linux/interrupt.h>
#include <linux/mii.h>

#include "slip.h"

#define LOOPS		16
#define LOOP_BYTES	200

enum { TEST_REGISTERS, TEST_EEPROM, TEST_INTERRUPT, TEST_LOOPBACK, TEST_LINK };

const char slip_test_names[SLIP_TESTS][ETH_GSTRING_LEN] = {
	"registers (offline)",
	"EEPROM (offline)",
	"interrupt (offline)",
	"loopback (offline)",
	"link",
};

static bool slip_test_register(struct slip_nic *nic, u32 offset, u32 mask)
{
	static const u32 patterns[] = { 0x5a5a5a5a, 0xa5a5a5a5, ~0, 0 };
	u32 at;

	for (at = 0; at < ARRAY_SIZE(patterns); at++) {
		slip_set(nic, offset, patterns[at]);
		if ((slip_get(nic, offset) ^ patterns[at]) & mask)
			return false;
	}
	return true;
}

static bool slip_test_registers(struct slip_nic *nic)
{
	static const struct {
		u32 offset;
		u32 mask;
	} tested[] = {
		{ REG_RDBAL, ~0xfU }, { REG_RDBAH, ~0U }, { REG_RDLEN, 0xfff80 },
		{ REG_TDBAL, ~0xfU }, { REG_TDBAH, ~0U }, { REG_TDLEN, 0xfff80 },
		{ REG_RAL(15), ~0U }, { REG_RAH(15), 0x8003ffff },
	};
	bool good = true;
	u32 at;

	for (at = 0; good && at < ARRAY_SIZE(tested); at++)
		good = slip_test_register(nic, tested[at].offset, tested[at].mask);
	for (at = 0; good && at < MTA_WORDS; at++)
		good = slip_test_register(nic, REG_MTA(at), ~0);
	return good;
}

static irqreturn_t slip_test_handler(int irq, void *data)
{
	struct slip_nic *nic = data;

	if (!(slip_get(nic, REG_ICR) & CAUSE_RXT0))
		return IRQ_NONE;
	complete(&nic->tested);
	return IRQ_HANDLED;
}

static bool slip_test_interrupt(struct slip_nic *nic)
{
	bool good;

	init_completion(&nic->tested);
	if (request_irq(nic->pdev->irq, slip_test_handler, IRQF_SHARED, SLIP_NAME, nic))
		return false;
	slip_set(nic, REG_IMS, CAUSE_RXT0);
	slip_set(nic, REG_ICS, CAUSE_RXT0);
	good = wait_for_completion_timeout(&nic->tested, HZ);
	slip_set(nic, REG_IMC, ~0);
	free_irq(nic->pdev->irq, nic);
	return good;
}

static void slip_phy_write(struct slip_nic *nic, u32 number, u16 value)
{
	int tries;

	slip_set(nic, REG_MDIC, MDIC_WRITE | MDIC_PHY | number << MDIC_REGISTER | value);
	for (tries = 0; tries < 100 && !(slip_get(nic, REG_MDIC) & MDIC_READY); tries++)
		usleep_range(50, 100);
}

/* A frame of the test's that has come back; the rest of the stack does not know its type. */
static int slip_test_receive(struct sk_buff *skb, struct net_device *netdev,
			     struct packet_type *type, struct net_device *original)
{
	struct slip_nic *nic = netdev_priv(netdev);
	u8 bytes[LOOP_BYTES];
	u32 at;

	if (skb_copy_bits(skb, 0, bytes, sizeof(bytes)))
		goto drop;
	for (at = 1; at < sizeof(bytes) && bytes[at] == (u8)(bytes[0] + at); at++)
		;
	if (at == sizeof(bytes) && atomic_inc_return(&nic->looped) == LOOPS)
		complete(&nic->tested);
drop:
	kfree_skb(skb);
	return NET_RX_DROP;
}

static void slip_test_send(struct slip_nic *nic, u8 number)
{
	struct net_device *netdev = nic->netdev;
	struct netdev_queue *queue = netdev_get_tx_queue(netdev, 0);
	struct sk_buff *skb = netdev_alloc_skb(netdev, ETH_HLEN + LOOP_BYTES);
	struct ethhdr *header;
	u32 at;

	if (!skb)
		return;
	header = skb_put(skb, ETH_HLEN);
	ether_addr_copy(header->h_dest, netdev->dev_addr);
	ether_addr_copy(header->h_source, netdev->dev_addr);
	header->h_proto = htons(ETH_P_LOOPBACK);
	for (at = 0; at < LOOP_BYTES; at++)
		skb_put_u8(skb, number + at);
	local_bh_disable();
	__netif_tx_lock(queue, smp_processor_id());
	if (slip_xmit(skb, netdev) != NETDEV_TX_OK)
		kfree_skb(skb);
	__netif_tx_unlock(queue);
	local_bh_enable();
}

/* Sends frames through both rings, with the PHY in loopback. */
static bool slip_test_loopback(struct slip_nic *nic)
{
	struct packet_type type = {
		.type = htons(ETH_P_LOOPBACK),
		.dev = nic->netdev,
		.func = slip_test_receive,
	};
	bool good = false;
	u8 number;

	atomic_set(&nic->looped, 0);
	init_completion(&nic->tested);
	slip_phy_write(nic, MII_BMCR, BMCR_LOOPBACK | BMCR_SPEED1000 | BMCR_FULLDPLX);
	if (!slip_up(nic)) {
		dev_add_pack(&type);
		for (number = 0; number < LOOPS; number++)
			slip_test_send(nic, number);
		good = wait_for_completion_timeout(&nic->tested, HZ);
		dev_remove_pack(&type);
		slip_down(nic);
	}
	slip_phy_write(nic, MII_BMCR, BMCR_ANENABLE | BMCR_ANRESTART | BMCR_SPEED1000 |
		       BMCR_FULLDPLX);
	return good;
}

static bool slip_test_link(struct slip_nic *nic)
{
	return !nic->runs || slip_get(nic, REG_STATUS) & STATUS_LU;
}

/* Each test has the controller as it is after a reset. */
static void slip_test_offline(struct slip_nic *nic, u64 *failed)
{
	u16 words[EEPROM_WORDS];

	failed[TEST_REGISTERS] = !slip_reset(nic) || !slip_test_registers(nic);
	failed[TEST_EEPROM] = !slip_reset(nic) || !slip_eeprom_read(nic, words);
	failed[TEST_INTERRUPT] = !slip_test_interrupt(nic);
	failed[TEST_LOOPBACK] = !slip_test_loopback(nic);
}

void slip_self_test(struct net_device *netdev, struct ethtool_test *test, u64 *failed)
{
	struct slip_nic *nic = netdev_priv(netdev);
	bool runs = nic->runs;
	u32 at;

	memset(failed, 0, SLIP_TESTS * sizeof(*failed));
	failed[TEST_LINK] = !slip_test_link(nic);
	if (test->flags & ETH_TEST_FL_OFFLINE) {
		if (runs)
			slip_down(nic);
		slip_test_offline(nic, failed);
		if (runs && slip_up(nic))
			netdev_err(netdev, "cannot start again; set the interface down and up\n");
	}
	for (at = 0; at < SLIP_TESTS; at++) {
		if (failed[at])
			test->flags |= ETH_TEST_FL_FAILED;
	}
}
