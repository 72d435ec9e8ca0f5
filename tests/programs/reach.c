/* reach [ADDRESS ERRNO]...: a queue pair that is changed to RTR with each of these peers, and an
 * address handle for each, fail with this error number; 0: they succeed. */
#include "rc.h"

static union ibv_gid gid_of(const char *address)
{
	union ibv_gid gid = { .raw = { [10] = 0xff, [11] = 0xff } };
	if (inet_pton(AF_INET, address, gid.raw + 12) != 1)
		die("%s is no address", address);
	return gid;
}

/* The index of this host's own GID with an IPv4 address other than loopback. */
static int own_index(struct ibv_context *context)
{
	struct ibv_port_attr port;
	ZERO(ibv_query_port(context, 1, &port));
	for (int index = 0; index < port.gid_tbl_len; index++) {
		union ibv_gid gid;
		ZERO(ibv_query_gid(context, 1, index, &gid));
		if (!gid.global.subnet_prefix && gid.raw[10] == 0xff && gid.raw[12] != 127)
			return index;
	}
	die("no GID of a network");
}

int main(int argc, char **argv)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	int index = own_index(context);
	for (int i = 1; i + 1 < argc; i += 2) {
		int wanted = atoi(argv[i + 1]);
		struct ibv_qp *qp = create_qp(pd, cq, 4);
		struct end me = end_of(qp, index, NULL), peer = { .gid = gid_of(argv[i]), .qpn = qp->qp_num ^ 1, .psn = 7 };
		int error = try_connect_qp(qp, &me, index, &peer);
		if (error != wanted)
			die("RTR to %s: %s, not %s", argv[i], strerror(error), strerror(wanted));
		struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .dgid = peer.gid, .sgid_index = index } };
		errno = 0;
		struct ibv_ah *ah = ibv_create_ah(pd, &to);
		error = ah ? 0 : errno;
		if (error != wanted)
			die("a handle for %s: %s, not %s", argv[i], strerror(error), strerror(wanted));
		if (ah)
			ZERO(ibv_destroy_ah(ah));
		ZERO(ibv_destroy_qp(qp));
	}
	puts("ok");
	return 0;
}
