/* Contexts that share the objects of one open device file: ibv_import_device and related calls,
 * with fds that were duplicated in every way, with objects that end on either side first, and
 * with fds and handles that are invalid. */
#define _GNU_SOURCE
#include "rc.h"
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>

#define LEN 20000

/* The call must fail with this error. */
#define FAILS(call, error)                                                                                            \
	do {                                                                                                          \
		errno = 0;                                                                                            \
		if ((call) || errno != (error))                                                                       \
			die("%s: %s instead of %s", #call, strerror(errno), strerror(error));                         \
	} while (0)
#define ANSWERS(call, error)                                                                                          \
	do {                                                                                                          \
		int answer_ = (call);                                                                                 \
		if (answer_ != (error))                                                                               \
			die("%s: %s instead of %s", #call, strerror(answer_), strerror(error));                       \
	} while (0)

static struct ibv_context *import(struct ibv_context *context)
{
	return SOME(ibv_import_device(dup(context->cmd_fd)));
}

/* A context, its completion queue, and two queue pairs in a domain, connected with each other. */
struct use {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *from, *to;
};

static struct use use(struct ibv_context *context, struct ibv_pd *pd)
{
	struct use use = { .context = context, .pd = pd, .cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0)) };
	use.from = create_qp(pd, use.cq, 4);
	use.to = create_qp(pd, use.cq, 4);
	struct end from = end_of(use.from, 0, NULL), to = end_of(use.to, 0, NULL);
	connect_qp(use.from, &from, 0, &to);
	connect_qp(use.to, &to, 0, &from);
	return use;
}

static void put_away(struct use *use)
{
	ZERO(ibv_destroy_qp(use->from));
	ZERO(ibv_destroy_qp(use->to));
	ZERO(ibv_destroy_cq(use->cq));
}

/* Writes the first half of the bytes to the second, through a region that may be available by
 * import alone. */
static void write_through(struct use *use, struct ibv_mr *mr, uint8_t *bytes, uint64_t seed)
{
	fill(bytes, LEN, seed);
	memset(bytes + LEN, 0, LEN);
	struct ibv_sge sge = { .addr = (uintptr_t)bytes, .length = LEN, .lkey = mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = (uintptr_t)bytes + LEN, .rkey = mr->rkey },
	}, *bad;
	ZERO(ibv_post_send(use->from, &wr, &bad));
	good_wc(use->cq);
	verify(bytes + LEN, LEN, seed);
}

static void alike(const struct ibv_mr *imported, const struct ibv_mr *own, struct ibv_pd *pd)
{
	if (imported->lkey != own->lkey || imported->rkey != own->rkey || imported->length != own->length ||
	    imported->handle != own->handle || imported->addr || imported->pd != pd || imported->context != pd->context)
		die("the imported region differs from the registered one");
}

/* An fd of the same open file, duplicated in every possible way. */
static int another(int fd, int way)
{
	switch (way) {
	case 0:
		return dup(fd);
	case 1:
		return dup2(fd, 300);
	case 2:
		return dup3(fd, 301, O_CLOEXEC);
	case 3:
		return fcntl(fd, F_DUPFD, 302);
	default:
		return fcntl(fd, F_DUPFD_CLOEXEC, 303);
	}
}

static void share(void)
{
	uint8_t *bytes = SOME(calloc(2, LEN));
	struct ibv_context *owner = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(owner));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, bytes, 2 * LEN, EVERY_ACCESS));
	struct use here = use(owner, pd);
	for (int way = 0; way < 5; way++) {
		struct ibv_context *context = SOME(ibv_import_device(another(owner->cmd_fd, way)));
		struct ibv_pd *imported_pd = SOME(ibv_import_pd(context, pd->handle));
		struct ibv_mr *imported_mr = SOME(ibv_import_mr(imported_pd, mr->handle));
		if (imported_pd->context != context || imported_pd->handle != pd->handle)
			die("the imported domain differs");
		alike(imported_mr, mr, imported_pd);
		struct use there = use(context, imported_pd);
		write_through(&there, imported_mr, bytes, way);
		/* The keys of either side are valid on the queue pairs of the other: it is one
		 * domain. */
		write_through(&there, mr, bytes, way + 10);
		write_through(&here, imported_mr, bytes, way + 20);
		ibv_unimport_mr(imported_mr);
		/* As in pyverbs: the domain's name is released before the objects in the domain. */
		ibv_unimport_pd(imported_pd);
		put_away(&there);
		ZERO(ibv_close_device(context));
		write_through(&here, mr, bytes, way + 30);
	}
	put_away(&here);
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(owner));
	free(bytes);
	puts("shared: the same domain and region, whichever way the fd was dup'd");
}

/* Whether the fd becomes readable. */
static bool readable(int fd, int timeout)
{
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
	return poll(&poll_fd, 1, timeout) == 1;
}

static void events(void)
{
	uint8_t bytes[64] = {};
	struct ibv_context *owner = open_device(), *context = import(owner);
	if (context->async_fd == owner->async_fd)
		die("one channel for the events of both");
	struct ibv_pd *own_pd = SOME(ibv_alloc_pd(owner)), *pd = SOME(ibv_import_pd(context, own_pd->handle));
	struct ibv_mr *own_mr = SOME(ibv_reg_mr(own_pd, bytes, sizeof bytes, EVERY_ACCESS));
	struct ibv_comp_channel *channel = SOME(ibv_create_comp_channel(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, &bytes, channel, 0)), *which;
	void *its_context;
	ZERO(ibv_req_notify_cq(cq, 0));
	struct ibv_qp *from = create_qp(pd, cq, 4), *to = create_qp(pd, cq, 4);
	struct end from_end = end_of(from, 0, NULL), to_end = end_of(to, 0, NULL);
	connect_qp(from, &from_end, 0, &to_end);
	connect_qp(to, &to_end, 0, &from_end);
	/* To memory that does not exist: the target gets the event in its own context. */
	struct ibv_sge sge = { .addr = (uintptr_t)bytes, .length = 8, .lkey = own_mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = (uintptr_t)bytes, .rkey = ~own_mr->rkey },
	}, *bad;
	ZERO(ibv_post_send(from, &wr, &bad));
	ZERO(ibv_get_cq_event(channel, &which, &its_context));
	if (which != cq || its_context != bytes)
		die("an event of another queue");
	ibv_ack_cq_events(cq, 1);
	struct ibv_async_event event;
	do {
		ZERO(ibv_get_async_event(context, &event));
		ibv_ack_async_event(&event);
	} while (event.event_type != IBV_EVENT_QP_ACCESS_ERR);
	if (event.element.qp != to)
		die("an event of another queue pair");
	if (readable(owner->async_fd, 100))
		die("the owner got an event of another object");
	ZERO(ibv_destroy_qp(from));
	ZERO(ibv_destroy_qp(to));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_destroy_comp_channel(channel));
	ibv_unimport_pd(pd);
	ZERO(ibv_close_device(context));
	ZERO(ibv_dereg_mr(own_mr));
	ZERO(ibv_dealloc_pd(own_pd));
	ZERO(ibv_close_device(owner));
	puts("events: to the context of their object");
}

static void endings(void)
{
	uint8_t *bytes = SOME(calloc(2, LEN));
	struct ibv_context *owner = open_device(), *context = import(owner);
	struct ibv_pd *pd = SOME(ibv_alloc_pd(owner)), *imported_pd = SOME(ibv_import_pd(context, pd->handle));
	uint32_t pd_handle = pd->handle;
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, bytes, 2 * LEN, EVERY_ACCESS));
	struct ibv_mr *imported_mr = SOME(ibv_import_mr(imported_pd, mr->handle));
	struct use there = use(context, imported_pd);
	ANSWERS(ibv_dealloc_pd(pd), EBUSY);
	ANSWERS(ibv_dealloc_pd(imported_pd), EBUSY);
	/* One side destroys the region: the other side can only release its name. */
	ZERO(ibv_dereg_mr(imported_mr));
	ANSWERS(ibv_dereg_mr(mr), ENOENT);
	FAILS(ibv_import_mr(imported_pd, mr->handle), ENOENT);
	ibv_unimport_mr(mr);
	/* The same with the sides exchanged. */
	mr = SOME(ibv_reg_mr(pd, bytes, 2 * LEN, EVERY_ACCESS));
	imported_mr = SOME(ibv_import_mr(imported_pd, mr->handle));
	write_through(&there, imported_mr, bytes, 1);
	ZERO(ibv_dereg_mr(mr));
	ANSWERS(ibv_dereg_mr(imported_mr), ENOENT);
	ibv_unimport_mr(imported_mr);
	put_away(&there);
	ZERO(ibv_dealloc_pd(pd));
	FAILS(ibv_reg_mr(imported_pd, bytes, LEN, EVERY_ACCESS), ENOENT);
	FAILS(ibv_import_pd(context, pd_handle), ENOENT);
	ANSWERS(ibv_dealloc_pd(imported_pd), ENOENT);
	ibv_unimport_pd(imported_pd);
	/* The owner abandons its domain and closes; the domain stays with the context that
	 * imported it. */
	pd = SOME(ibv_alloc_pd(owner));
	mr = SOME(ibv_reg_mr(pd, bytes, 2 * LEN, EVERY_ACCESS));
	imported_pd = SOME(ibv_import_pd(context, pd->handle));
	there = use(context, imported_pd);
	uint32_t mr_handle = mr->handle;
	pd_handle = pd->handle;
	ibv_unimport_mr(mr);
	ibv_unimport_pd(pd);
	ZERO(ibv_close_device(owner));
	imported_mr = SOME(ibv_import_mr(imported_pd, mr_handle));
	write_through(&there, imported_mr, bytes, 2);
	put_away(&there);
	/* A duplicated fd alone also keeps the domain. */
	int fd = dup(context->cmd_fd);
	ibv_unimport_mr(imported_mr);
	ibv_unimport_pd(imported_pd);
	ZERO(ibv_close_device(context));
	context = SOME(ibv_import_device(fd));
	imported_pd = SOME(ibv_import_pd(context, pd_handle));
	imported_mr = SOME(ibv_import_mr(imported_pd, mr_handle));
	there = use(context, imported_pd);
	write_through(&there, imported_mr, bytes, 3);
	put_away(&there);
	ZERO(ibv_dereg_mr(imported_mr));
	ZERO(ibv_dealloc_pd(imported_pd));
	ZERO(ibv_close_device(context));
	free(bytes);
	puts("endings: destroyed once, by either side; kept while an fd is open");
}

static void device_memory(void)
{
	uint32_t bytes[16];
	struct ibv_context *owner = open_device(), *context = import(owner);
	struct ibv_alloc_dm_attr attr = { .length = sizeof bytes };
	struct ibv_dm *dm[2] = { SOME(ibv_alloc_dm(owner, &attr)), SOME(ibv_alloc_dm(owner, &attr)) };
	struct ibv_dm *imported = SOME(ibv_import_dm(context, dm[1]->handle));
	for (int i = 0; i < 16; i++)
		bytes[i] = i * 0x01010101;
	ZERO(ibv_memcpy_to_dm(dm[1], 0, bytes, sizeof bytes));
	memset(bytes, 0, sizeof bytes);
	ZERO(ibv_memcpy_to_dm(dm[0], 0, bytes, sizeof bytes));
	ZERO(ibv_memcpy_from_dm(bytes, imported, 0, sizeof bytes));
	for (uint32_t i = 0; i < 16; i++)
		if (bytes[i] != i * 0x01010101)
			die("other bytes than were written");
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_mr *mr = SOME(ibv_reg_dm_mr(pd, imported, 0, sizeof bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ZERO_BASED));
	ANSWERS(ibv_free_dm(dm[1]), EBUSY);
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_free_dm(dm[1]));
	ANSWERS(ibv_free_dm(imported), ENOENT);
	FAILS(ibv_reg_dm_mr(pd, imported, 0, sizeof bytes, IBV_ACCESS_ZERO_BASED), ENOENT);
	ibv_unimport_dm(imported);
	ZERO(ibv_free_dm(dm[0]));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	ZERO(ibv_close_device(owner));
	puts("device memory: seen by both");
}

static void wrong(void)
{
	struct ibv_context *owner = open_device(), *other_context = open_device(), *context = import(owner);
	struct ibv_pd *foreign_pd = SOME(ibv_alloc_pd(other_context)), *pd = SOME(ibv_alloc_pd(context));
	struct ibv_mr *foreign_mr = SOME(ibv_reg_mr(foreign_pd, &owner, sizeof owner, 0));
	struct ibv_alloc_dm_attr attr = { .length = 64 };
	struct ibv_dm *foreign_dm = SOME(ibv_alloc_dm(other_context, &attr));
	FAILS(ibv_import_pd(context, foreign_pd->handle), ENOENT);
	FAILS(ibv_import_mr(pd, foreign_mr->handle), ENOENT);
	FAILS(ibv_import_dm(context, foreign_dm->handle), ENOENT);
	FAILS(ibv_import_pd(context, UINT32_MAX), ENOENT);
	FAILS(ibv_import_mr(pd, UINT32_MAX), ENOENT);
	FAILS(ibv_import_dm(context, UINT32_MAX), ENOENT);
	ZERO(ibv_free_dm(foreign_dm));
	ZERO(ibv_dereg_mr(foreign_mr));
	ZERO(ibv_dealloc_pd(foreign_pd));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(other_context));
	ZERO(ibv_close_device(context));

	int pipes[2], zero = open("/dev/zero", O_RDWR), null = open("/dev/null", O_RDWR);
	char node[300];
	snprintf(node, sizeof node, "/dev/infiniband/%s", owner->device->dev_name);
	int file = open("/proc/self/status", O_RDONLY), device = open(node, O_RDWR | O_CLOEXEC);
	ZERO(pipe(pipes));
	if (zero < 0 || null < 0 || file < 0 || device < 0)
		die("open: %s", strerror(errno));
	FAILS(ibv_import_device(-1), EINVAL);
	FAILS(ibv_import_device(1000), EINVAL);
	FAILS(ibv_import_device(file), EINVAL);
	FAILS(ibv_import_device(pipes[0]), EINVAL);
	FAILS(ibv_import_device(owner->async_fd), EINVAL);
	FAILS(ibv_import_device(zero), ENODEV);
	/* No device, or the device of another process: the two cannot be distinguished. */
	FAILS(ibv_import_device(null), EOPNOTSUPP);
	/* No context was opened on it. */
	FAILS(ibv_import_device(device), EINVAL);
	/* The owner must still close the fd. */
	int all[] = { pipes[0], pipes[1], zero, null, file, device };
	for (int i = 0; i < 6; i++)
		ZERO(close(all[i]));
	ZERO(ibv_close_device(owner));
	puts("wrong: other files and invalid handles are refused");
}

/* Gives another process an fd. */
static void give(int sock, int fd)
{
	char byte = 0;
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof fd)];
	} control = {};
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
	struct cmsghdr *header = CMSG_FIRSTHDR(&msg);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(header), &fd, sizeof fd);
	if (sendmsg(sock, &msg, 0) != 1)
		die("sendmsg: %s", strerror(errno));
}

static int taken(int sock)
{
	char byte;
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
	int fd;
	if (recvmsg(sock, &msg, 0) != 1 || !CMSG_FIRSTHDR(&msg))
		die("recvmsg: %s", strerror(errno));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof fd);
	return fd;
}

static void waited_for(pid_t child)
{
	int status;
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	if (status)
		die("the child ended with %#x", status);
}

static void elsewhere(void)
{
	int socks[2];
	ZERO(socketpair(AF_UNIX, SOCK_STREAM, 0, socks));
	pid_t other = fork();
	if (other == 0) {
		FAILS(ibv_import_device(taken(socks[1])), EOPNOTSUPP);
		_exit(0);
	}
	struct ibv_context *owner = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(owner));
	give(socks[0], owner->cmd_fd);
	waited_for(other);
	pid_t child = fork();
	if (child == 0) {
		FAILS(ibv_import_device(dup(owner->cmd_fd)), EOPNOTSUPP);
		FAILS(ibv_import_device(owner->cmd_fd), EOPNOTSUPP);
		/* The child's own device is another one, and has handles of its own. */
		struct ibv_context *own = open_device(), *context = import(own);
		struct ibv_pd *own_pd = SOME(ibv_alloc_pd(own));
		ibv_unimport_pd(SOME(ibv_import_pd(context, own_pd->handle)));
		ZERO(ibv_dealloc_pd(own_pd));
		ZERO(ibv_close_device(context));
		ZERO(ibv_close_device(own));
		_exit(0);
	}
	waited_for(child);
	struct ibv_context *context = import(owner);
	ibv_unimport_pd(SOME(ibv_import_pd(context, pd->handle)));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(owner));
	ZERO(ibv_close_device(context));
	puts("elsewhere: refused to other processes");
}

static int open_fds(void)
{
	DIR *dir = SOME(opendir("/proc/self/fd"));
	int count = 0;
	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}

static void again_and_again(void)
{
	struct ibv_context *owner = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(owner));
	int before = open_fds();
	for (int i = 0; i < 50; i++) {
		struct ibv_context *context = import(owner), *next = import(context);
		ibv_unimport_pd(SOME(ibv_import_pd(next, pd->handle)));
		ZERO(ibv_close_device(context));
		ZERO(ibv_close_device(next));
	}
	// Streams of earlier scenes may still be closing.
	if (open_fds() > before)
		die("%d fds more than before", open_fds() - before);
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(owner));
	puts("repeated: no descriptor is leaked");
}

/* Objects without a remaining name are destroyed with their file: otherwise the device would run
 * out of domains. */
static void forgotten(void)
{
	enum { EACH = 64 };
	static uint8_t bytes[LEN];
	struct ibv_context *owner = open_device();
	struct ibv_device_attr attr;
	ZERO(ibv_query_device(owner, &attr));
	ZERO(ibv_close_device(owner));
	for (int made = 0; made <= attr.max_pd; made += EACH) {
		struct ibv_context *context = open_device();
		for (int i = 0; i < EACH; i++) {
			struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
			ibv_unimport_mr(SOME(ibv_reg_mr(pd, bytes, LEN, EVERY_ACCESS)));
			ibv_unimport_pd(pd);
		}
		ZERO(ibv_close_device(context));
	}
	puts("abandoned: destroyed with the file");
}

int main(void)
{
	share();
	events();
	endings();
	device_memory();
	wrong();
	elsewhere();
	again_and_again();
	forgotten();
	return 0;
}
