/* The tables of the port, in every way in which a program asks for them. Prints one line for each
 * GID: index, type, and interface. */
#include "rc.h"

int main(void)
{
	struct ibv_context *context = open_device();
	struct ibv_port_attr port;
	struct ibv_gid_entry table[256], entry;
	__be16 pkey;
	ZERO(ibv_query_port(context, 1, &port));
	if (port.state != IBV_PORT_ACTIVE || port.phys_state != 5 || port.link_layer != IBV_LINK_LAYER_ETHERNET)
		die("state %d, physical %d, link layer %d", port.state, port.phys_state, port.link_layer);
	if (!(port.port_cap_flags & IBV_PORT_IP_BASED_GIDS) || !(port.port_cap_flags & IBV_PORT_CM_SUP))
		die("capabilities %#x", port.port_cap_flags);
	if (port.sm_lid || port.lmc || port.max_msg_sz < 1 << 30 || port.max_mtu < port.active_mtu)
		die("sm %d, lmc %d, messages %u, MTU %d of %d", port.sm_lid, port.lmc, port.max_msg_sz,
		    port.active_mtu, port.max_mtu);

	ssize_t count = ibv_query_gid_table(context, table, 256, 0);
	if (count != port.gid_tbl_len)
		die("%zd GIDs of %d", count, port.gid_tbl_len);
	for (int i = 0; i < count; i++) {
		union ibv_gid gid;
		ZERO(ibv_query_gid(context, 1, i, &gid));
		ZERO(ibv_query_gid_ex(context, 1, i, &entry, 0));
		if (memcmp(&gid, &entry.gid, sizeof gid) || memcmp(&entry, &table[i], sizeof entry))
			die("GID %d differs", i);
		printf("%d %d %u\n", i, entry.gid_type, entry.ndev_ifindex);
	}
	if (ibv_query_gid_ex(context, 1, count, &entry, 0) == 0)
		die("a GID after the last one");

	for (int i = 0; i < port.pkey_tbl_len; i++)
		ZERO(ibv_query_pkey(context, 1, i, &pkey));
	if (ibv_query_pkey(context, 1, port.pkey_tbl_len, &pkey) == 0)
		die("a P_Key after the last one");
	if (ibv_get_pkey_index(context, 1, htons(0xffff)) != 0 || ibv_get_pkey_index(context, 1, htons(0x1234)) != -1)
		die("the index of a P_Key");
	ZERO(ibv_close_device(context));
	return 0;
}
