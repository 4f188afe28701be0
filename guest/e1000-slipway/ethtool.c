// SPDX-License-Identifier: GPL-2.0
/* What ethtool shows and sets. */
#include <linux/ethtool.h>

#include "slip.h"

static const char slip_flag_names[SLIP_FLAGS][ETH_GSTRING_LEN] = {
	"send-combining",
	"lazy-tx",
	"csb",
	"polling",
};

/* In the order of struct slip_stats. */
static const char slip_stat_names[][ETH_GSTRING_LEN] = {
	"interrupts",
	"polls",
	"tdt_writes",
	"tdt_combined",
	"csb_tails",
	"rdt_writes",
	"tx_stopped",
	"tx_contexts",
	"tx_checksums",
	"tx_segmented",
	"rx_checksums_good",
	"rx_checksums_bad",
	"rx_no_memory",
	"rx_segments",
	"idle_polls",
};

static void slip_get_drvinfo(struct net_device *netdev, struct ethtool_drvinfo *info)
{
	struct slip_nic *nic = netdev_priv(netdev);

	strscpy(info->driver, SLIP_NAME, sizeof(info->driver));
	strscpy(info->bus_info, pci_name(nic->pdev), sizeof(info->bus_info));
}

static void slip_get_strings(struct net_device *netdev, u32 set, u8 *data)
{
	BUILD_BUG_ON(ARRAY_SIZE(slip_stat_names) != sizeof(struct slip_stats) / sizeof(u64));
	if (set == ETH_SS_STATS)
		memcpy(data, slip_stat_names, sizeof(slip_stat_names));
	else if (set == ETH_SS_PRIV_FLAGS)
		memcpy(data, slip_flag_names, sizeof(slip_flag_names));
	else if (set == ETH_SS_TEST)
		memcpy(data, slip_test_names, sizeof(slip_test_names));
}

static int slip_get_sset_count(struct net_device *netdev, int set)
{
	switch (set) {
	case ETH_SS_STATS:
		return ARRAY_SIZE(slip_stat_names);
	case ETH_SS_PRIV_FLAGS:
		return SLIP_FLAGS;
	case ETH_SS_TEST:
		return SLIP_TESTS;
	default:
		return -EOPNOTSUPP;
	}
}

static void slip_get_ethtool_stats(struct net_device *netdev, struct ethtool_stats *stats,
				   u64 *data)
{
	struct slip_nic *nic = netdev_priv(netdev);

	memcpy(data, &nic->stats, sizeof(nic->stats));
}

/* Carries out a change that the rings must not see. */
static int slip_change(struct slip_nic *nic, u32 flags, u32 rx, u32 tx)
{
	bool runs = nic->runs;

	if (runs)
		slip_down(nic);
	nic->flags = flags;
	nic->rx.count = rx;
	nic->tx.count = tx;
	return runs ? slip_up(nic) : 0;
}

static u32 slip_get_priv_flags(struct net_device *netdev)
{
	return ((struct slip_nic *)netdev_priv(netdev))->flags;
}

static int slip_set_priv_flags(struct net_device *netdev, u32 flags)
{
	struct slip_nic *nic = netdev_priv(netdev);

	/* One waits for interrupts of sent frames, the other does without them. */
	if ((flags & SLIP_FLAG_COMBINE) && (flags & SLIP_FLAG_LAZY)) {
		netdev_err(netdev,
			   "send-combining and lazy-tx exclude each other; switch one off first\n");
		return -EINVAL;
	}
	if (flags == nic->flags)
		return 0;
	return slip_change(nic, flags, nic->rx.count, nic->tx.count);
}

static void slip_get_ringparam(struct net_device *netdev, struct ethtool_ringparam *ring,
			       struct kernel_ethtool_ringparam *kernel_ring,
			       struct netlink_ext_ack *extack)
{
	struct slip_nic *nic = netdev_priv(netdev);

	ring->rx_max_pending = SLIP_RING_MAX;
	ring->tx_max_pending = SLIP_RING_MAX;
	ring->rx_pending = nic->rx.count;
	ring->tx_pending = nic->tx.count;
}

static u32 slip_ring_size(u32 wanted)
{
	return clamp_t(u32, ALIGN(wanted, 8), SLIP_RING_MIN, SLIP_RING_MAX);
}

static int slip_set_ringparam(struct net_device *netdev, struct ethtool_ringparam *ring,
			      struct kernel_ethtool_ringparam *kernel_ring,
			       struct netlink_ext_ack *extack)
{
	struct slip_nic *nic = netdev_priv(netdev);

	if (ring->rx_mini_pending || ring->rx_jumbo_pending)
		return -EINVAL;
	return slip_change(nic, nic->flags, slip_ring_size(ring->rx_pending),
			   slip_ring_size(ring->tx_pending));
}

static int slip_get_coalesce(struct net_device *netdev, struct ethtool_coalesce *coalesce,
			     struct kernel_ethtool_coalesce *kernel_coalesce,
			     struct netlink_ext_ack *extack)
{
	struct slip_nic *nic = netdev_priv(netdev);

	coalesce->rx_coalesce_usecs = DIV_ROUND_CLOSEST(nic->itr * ITR_UNIT_NS, 1000);
	return 0;
}

static int slip_set_coalesce(struct net_device *netdev, struct ethtool_coalesce *coalesce,
			     struct kernel_ethtool_coalesce *kernel_coalesce,
			     struct netlink_ext_ack *extack)
{
	struct slip_nic *nic = netdev_priv(netdev);
	u64 units = DIV_ROUND_CLOSEST_ULL(coalesce->rx_coalesce_usecs * 1000ULL, ITR_UNIT_NS);

	if (units > ITR_MAX) {
		NL_SET_ERR_MSG_MOD(extack,
				   "rx-usecs is at most 16776, the longest interval of ITR");
		return -EINVAL;
	}
	nic->itr = units;
	if (nic->runs)
		slip_set(nic, REG_ITR, nic->itr);
	return 0;
}

static int slip_get_link_ksettings(struct net_device *netdev,
				   struct ethtool_link_ksettings *settings)
{
	ethtool_link_ksettings_zero_link_mode(settings, supported);
	ethtool_link_ksettings_zero_link_mode(settings, advertising);
	ethtool_link_ksettings_add_link_mode(settings, supported, 1000baseT_Full);
	ethtool_link_ksettings_add_link_mode(settings, supported, Autoneg);
	ethtool_link_ksettings_add_link_mode(settings, supported, TP);
	ethtool_link_ksettings_add_link_mode(settings, advertising, 1000baseT_Full);
	ethtool_link_ksettings_add_link_mode(settings, advertising, Autoneg);
	ethtool_link_ksettings_add_link_mode(settings, advertising, TP);
	settings->base.port = PORT_TP;
	settings->base.autoneg = AUTONEG_ENABLE;
	settings->base.speed = netif_carrier_ok(netdev) ? SPEED_1000 : SPEED_UNKNOWN;
	settings->base.duplex = netif_carrier_ok(netdev) ? DUPLEX_FULL : DUPLEX_UNKNOWN;
	return 0;
}

/* Starts the device anew: it may have been reset without the driver being told. */
static int slip_nway_reset(struct net_device *netdev)
{
	struct slip_nic *nic = netdev_priv(netdev);

	if (netif_running(netdev))
		schedule_work(&nic->restart);
	return 0;
}

const struct ethtool_ops slip_ethtool_ops = {
	.supported_coalesce_params = ETHTOOL_COALESCE_RX_USECS,
	.get_drvinfo		= slip_get_drvinfo,
	.get_link		= ethtool_op_get_link,
	.nway_reset		= slip_nway_reset,
	.get_link_ksettings	= slip_get_link_ksettings,
	.get_strings		= slip_get_strings,
	.get_sset_count		= slip_get_sset_count,
	.get_ethtool_stats	= slip_get_ethtool_stats,
	.self_test		= slip_self_test,
	.get_priv_flags		= slip_get_priv_flags,
	.set_priv_flags		= slip_set_priv_flags,
	.get_ringparam		= slip_get_ringparam,
	.set_ringparam		= slip_set_ringparam,
	.get_coalesce		= slip_get_coalesce,
	.set_coalesce		= slip_set_coalesce,
};
