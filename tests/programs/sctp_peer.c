/* sctp_peer: DDP and RDMAP over the kernel's SCTP (RFC 5043, RFC 6581 §7), as small as it can be.
 *
 *   sctp_peer active ADDRESS PORT [OPTION...]    begins sessions, sends, ends them
 *   sctp_peer passive PORT [OPTION...]           accepts sessions, and echoes each Send
 *
 *   encap PORT     the peer's UDP port (RFC 6951), without which SCTP packets go in IP
 *   adaptation N   the Adaptation Indication, instead of DDP's; 0: none
 *   sessions N     so many sessions in one association at once; active: on the streams 0 to N - 1
 *   rounds N       so many times, one after the other on the same streams
 *   enhanced       active: with IRD and ORD (RFC 6581 §7); a passive end answers in the peer's form
 *   sends N        active: so many Sends in each session, of which 8 wait for their echoes
 *   size BYTES     of a Send
 *   tagged         active: writes into the memory of a passive sctp_peer, and reads that back
 *   reject         passive: rejects every session
 *   ordered        sends its chunks in order, which RFC 5043 §10 forbids
 *   rping N        active: is a client of rping for N pings; passive (any N): is a server of rping
 *
 * The layers, from below: an association (a socket), chunks with their DDP-SSN (a session is the
 * pair of streams with one number), session control, DDP segments, RDMAP messages, and the two
 * roles. Every message on its way or here is a line of output. The program ends with status 1 and
 * one line when the peer does what the RFCs do not permit, and when nothing comes for a minute. */
#include "rc.h"
#include <endian.h>
#include <linux/sctp.h>
#include <sys/uio.h>

enum { SESSIONS = 64, MESSAGE = 1 << 16, WAITING = 4096, WINDOW = 8, LIMIT = 60 };

/* Payload Protocol Identifiers and the Adaptation Indication (RFC 5043 §5.2, §11.1). */
enum { SEGMENT = 16, SESSION_CONTROL = 17, ADAPTATION_DDP = 1 };

/* Function codes (RFC 5043 §5.2.3). RFC 6581 §7 adds ENHANCED to each but the last. */
enum { INITIATE = 1, ACCEPT, REJECT, TERMINATE, ENHANCED = 4 };

/* Flags of the IRD/ORD word (RFC 6581 §9.1): the peer-to-peer model, and what opens it. */
enum { PEER_TO_PEER = 1u << 31, RTR_SEND = 1 << 30, RTR_WRITE = 1 << 15, RTR_READ = 1 << 14, DEPTH = 4 };

/* DDP's control byte (RFC 5041 §4.1), and RDMAP's, with its opcode (RFC 5040 §4.1). */
enum { TAGGED = 0x80, LAST = 0x40, DDP_VERSION = 1, RDMAP_VERSION = 0x40 };
enum { WRITE, READ_REQUEST, READ_RESPONSE, SEND, QN_SEND = 0, QN_READ = 1 };

#define PACKED __attribute__((packed))
struct tagged {
	uint8_t ddp, rdmap;
	uint32_t stag;
	uint64_t to;
} PACKED;
struct untagged {
	uint8_t ddp, rdmap;
	uint32_t invalidated, qn, msn, mo;
} PACKED;
struct read_request {
	uint32_t sink_stag;
	uint64_t sink_to;
	uint32_t length, source_stag;
	uint64_t source_to;
} PACKED;
/* What rping sends, to say where its memory is. */
struct advertisement {
	uint64_t to;
	uint32_t stag, length;
} PACKED;

/* A message of SCTP, without its DDP-SSN. */
struct chunk {
	uint32_t ppid;
	size_t len;
	uint8_t bytes[];
};

struct session {
	uint16_t stream, ssn_out, ssn_in;
	/* Chunks that came before their turn, by their DDP-SSN modulo WAITING. */
	struct chunk *waiting[WAITING];
	bool accepted, rejected, terminated_here, terminated_there;
	/* The number of its sessions that have ended. */
	int ended;
	/* The next message of each untagged queue, in each direction. */
	uint32_t msn_out[2], msn_in[2];
	/* The untagged message that is coming; DDP segments it. */
	uint8_t message[MESSAGE];
	size_t have;
	unsigned sends, reads;
	/* Memory of two halves that the peer may use: it has the STag and the offset of below. */
	uint8_t memory[2 * MESSAGE];
	/* What the peer advertised, in the role of a server of rping. */
	struct advertisement far;
};

/* Names of the memory, which mean something only to this program. */
#define STAG(session) (0x5c700u + (session)->stream)
#define OFFSET 0x1000

static struct {
	bool active, enhanced, tagged, reject, ordered;
	int encap, adaptation, sessions, rounds, sends, rping;
	size_t size;
} options = { .adaptation = ADAPTATION_DDP, .sessions = 1, .rounds = 1, .sends = 1, .size = 64 };

static struct session sessions[SESSIONS];
/* Sessions of all streams that have ended. */
static int ended;
static int sock;
/* The most bytes of a chunk that SCTP does not fragment, with the DDP-SSN. */
static size_t longest;

/* --- The association. --- */

static void set(int option, const void *value, size_t len)
{
	if (setsockopt(sock, IPPROTO_SCTP, option, value, len))
		die("SCTP option %d: %s", option, strerror(errno));
}

static void open_socket(void)
{
	int on = 1;
	struct sctp_initmsg streams = { .sinit_num_ostreams = SESSIONS, .sinit_max_instreams = SESSIONS };
	struct sctp_setadaptation adaptation = { options.adaptation };
	struct sctp_event event = { .se_type = SCTP_ADAPTATION_INDICATION, .se_on = 1 };
	struct sctp_udpencaps encap = { .sue_port = htons(options.encap) };
	sock = socket(AF_INET, SOCK_STREAM, IPPROTO_SCTP);
	if (sock < 0)
		die("no SCTP: %s", strerror(errno));
	set(SCTP_INITMSG, &streams, sizeof streams);
	set(SCTP_ADAPTATION_LAYER, &adaptation, sizeof adaptation);
	/* A segment is a message, and a message a packet (RFC 5043 §9). */
	set(SCTP_DISABLE_FRAGMENTS, &on, sizeof on);
	set(SCTP_NODELAY, &on, sizeof on);
	set(SCTP_RECVRCVINFO, &on, sizeof on);
	set(SCTP_EVENT, &event, sizeof event);
	if (options.encap)
		set(SCTP_REMOTE_UDP_ENCAPS_PORT, &encap, sizeof encap);
}

static void associate(const char *address, const char *port)
{
	struct sockaddr_in peer = { .sin_family = AF_INET, .sin_port = htons(atoi(port)) };
	int on = 1;
	open_socket();
	if (address) {
		if (inet_pton(AF_INET, address, &peer.sin_addr) != 1)
			die("%s is no IPv4 address", address);
		ZERO(connect(sock, (struct sockaddr *)&peer, sizeof peer));
	} else {
		ZERO(setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
		ZERO(bind(sock, (struct sockaddr *)&peer, sizeof peer));
		ZERO(listen(sock, 1));
		printf("listening\n");
		int listener = sock;
		sock = accept(listener, NULL, NULL);
		if (sock < 0)
			die("accept: %s", strerror(errno));
		close(listener);
	}
	struct sctp_status status;
	socklen_t len = sizeof status;
	ZERO(getsockopt(sock, IPPROTO_SCTP, SCTP_STATUS, &status, &len));
	longest = status.sstat_fragmentation_point;
	printf("association: streams %d in, %d out, chunks of %zu bytes\n", status.sstat_instrms, status.sstat_outstrms,
	       longest);
	if (status.sstat_outstrms < options.sessions)
		die("%d streams are too few", status.sstat_outstrms);
}

/* --- Chunks. They are sent unordered, and the DDP-SSN has their order (RFC 5043 §5.2.1). --- */

static struct iovec part(const void *bytes, size_t len)
{
	return (struct iovec){ (void *)bytes, len };
}

static void send_chunk(struct session *session, uint32_t ppid, struct iovec header, struct iovec data)
{
	uint16_t ssn = htons(session->ssn_out++);
	struct iovec parts[] = { part(&ssn, sizeof ssn), header, data };
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(sizeof(struct sctp_sndinfo))];
	} control = { { CMSG_LEN(sizeof(struct sctp_sndinfo)), IPPROTO_SCTP, SCTP_SNDINFO } };
	int order = options.ordered ? 0 : SCTP_UNORDERED;
	struct sctp_sndinfo info = { .snd_sid = session->stream, .snd_flags = order, .snd_ppid = htonl(ppid) };
	memcpy(CMSG_DATA(&control.header), &info, sizeof info);
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 3 };
	message.msg_control = &control;
	message.msg_controllen = sizeof control;
	if (sendmsg(sock, &message, MSG_NOSIGNAL) < 0)
		die("session %u: sending: %s", session->stream, strerror(errno));
}

static void notified(const union sctp_notification *notification)
{
	static bool is_ddp;
	if (!notification) {
		if (!is_ddp)
			die("the peer has not indicated DDP");
		return;
	}
	if (notification->sn_header.sn_type != SCTP_ADAPTATION_INDICATION)
		die("notification %#x", notification->sn_header.sn_type);
	unsigned code = notification->sn_adaptation_event.sai_adaptation_ind;
	printf("association: adaptation %u\n", code);
	is_ddp = code == ADAPTATION_DDP;
}

/* Keeps a chunk until its turn. */
static struct session *keep(const struct sctp_rcvinfo *info, const uint8_t *bytes, size_t len)
{
	uint32_t ppid = ntohl(info->rcv_ppid);
	if (info->rcv_sid >= (options.active ? options.sessions : SESSIONS))
		die("a chunk on stream %u", info->rcv_sid);
	struct session *session = &sessions[info->rcv_sid];
	if (!(info->rcv_flags & SCTP_UNORDERED))
		die("session %u: an ordered chunk", session->stream);
	if ((ppid != SEGMENT && ppid != SESSION_CONTROL) || len < 2)
		die("session %u: a chunk of %zu bytes with identifier %u", session->stream, len, ppid);
	uint16_t ssn = bytes[0] << 8 | bytes[1];
	struct chunk **place = &session->waiting[ssn % WAITING];
	if ((uint16_t)(ssn - session->ssn_in) >= WAITING || *place)
		die("session %u: DDP-SSN %u, while %u is due", session->stream, ssn, session->ssn_in);
	if (ssn != session->ssn_in)
		printf("session %u: DDP-SSN %u came before %u\n", session->stream, ssn, session->ssn_in);
	*place = SOME(malloc(sizeof(struct chunk) + len));
	(*place)->ppid = ppid;
	(*place)->len = len - 2;
	memcpy((*place)->bytes, bytes + 2, len - 2);
	return session;
}

/* Takes one chunk from the socket. Returns its session, or NULL: nothing has come (only with
 * MSG_DONTWAIT). */
static struct session *receive_chunk(int flags)
{
	static uint8_t bytes[MESSAGE];
	char control[CMSG_SPACE(sizeof(struct sctp_rcvinfo))];
	struct iovec place = part(bytes, sizeof bytes);
	struct sctp_rcvinfo info;
	for (;;) {
		struct msghdr message = { .msg_iov = &place, .msg_iovlen = 1 };
		message.msg_control = control;
		message.msg_controllen = sizeof control;
		alarm(LIMIT);
		ssize_t len = recvmsg(sock, &message, flags);
		if (len < 0 && errno == EAGAIN)
			return NULL;
		if (len <= 0)
			die("the association ended: %s", len ? strerror(errno) : "shutdown");
		if (!(message.msg_flags & MSG_EOR))
			die("a chunk came in parts: the peer has fragmented it");
		if (message.msg_flags & MSG_NOTIFICATION) {
			notified((union sctp_notification *)bytes);
			continue;
		}
		notified(NULL);
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		if (!header || header->cmsg_type != SCTP_RCVINFO)
			die("a chunk without its stream");
		memcpy(&info, CMSG_DATA(header), sizeof info);
		return keep(&info, bytes, len);
	}
}

/* --- Session control (RFC 5043 §5.2.3). --- */

/* Prints a message: its name, the word if it has one, and the private data. */
static void print_control(struct session *session, const char *verb, const uint8_t *bytes, size_t len)
{
	static const char *const names[] = {
		[INITIATE] = "Initiate", [ACCEPT] = "Accept", [REJECT] = "Reject", [TERMINATE] = "Terminate"
	};
	unsigned code = bytes[1], function = code > TERMINATE ? code - ENHANCED : code;
	printf("session %u: %s %s%s", session->stream, verb, code == function ? "" : "Enhanced ", names[function]);
	bytes += 2;
	len -= 2;
	if (code != function && function != REJECT) {
		uint32_t word;
		memcpy(&word, bytes, sizeof word);
		word = ntohl(word);
		printf(" word %#010x ird %u ord %u", word, word >> 16 & 0x3fff, word & 0x3fff);
		bytes += sizeof word;
		len -= sizeof word;
	}
	printf(", private data %zu \"", len);
	for (size_t at = 0; at < len; at++)
		putchar(bytes[at] >= ' ' && bytes[at] < 127 ? bytes[at] : '.');
	printf("\"\n");
}

/* Sends a message; the word is sent in the enhanced form of those functions that have it. */
static void send_control(struct session *session, unsigned function, bool enhanced, uint32_t word, const char *said)
{
	uint8_t bytes[516] = { 0, enhanced ? function + ENHANCED : function };
	size_t len = 2;
	if (enhanced && function != REJECT) {
		word = htonl(word);
		memcpy(bytes + len, &word, sizeof word);
		len += sizeof word;
	}
	memcpy(bytes + len, said, strlen(said));
	len += strlen(said);
	send_chunk(session, SESSION_CONTROL, part(NULL, 0), part(bytes, len));
	print_control(session, "sent", bytes, len);
}

static void end_session(struct session *session)
{
	session->terminated_here = true;
	send_control(session, TERMINATE, false, 0, "");
}

/* The next session of the stream begins with DDP-SSN 0 (RFC 5043 §6.1), and MSN 1. */
static void begin_anew(struct session *session)
{
	session->accepted = session->rejected = session->terminated_here = session->terminated_there = false;
	session->ssn_out = session->ssn_in = session->sends = session->reads = 0;
	memset(session->msn_out, 0, sizeof session->msn_out);
	memset(session->msn_in, 0, sizeof session->msn_in);
}

/* The passive end's answer to a request with this word: it answers as many Reads as the peer may
 * send, and sends no more than the peer answers (RFC 6581 §9.1). */
static void answer(struct session *session, bool enhanced, uint32_t word)
{
	uint32_t ird = word >> 16 & 0x3fff, ord = word & 0x3fff;
	uint32_t rtr = word & RTR_WRITE ? RTR_WRITE : word & RTR_READ ? RTR_READ : word & RTR_SEND;
	uint32_t model = word & PEER_TO_PEER ? PEER_TO_PEER | rtr : 0;
	if (options.reject) {
		session->rejected = session->terminated_here = session->terminated_there = true;
		send_control(session, REJECT, enhanced, 0, "no session");
		return;
	}
	session->accepted = true;
	send_control(session, ACCEPT, enhanced, model | ord << 16 | (ird < DEPTH ? ird : DEPTH), "accepted by the kernel");
}

static void take_control(struct session *session, const uint8_t *bytes, size_t len)
{
	unsigned code = len < 2 ? 0 : bytes[0] << 8 | bytes[1];
	bool enhanced = code > TERMINATE;
	unsigned function = enhanced ? code - ENHANCED : code;
	if (code < INITIATE || code > REJECT + ENHANCED || (enhanced && function != REJECT && len < 6))
		die("session %u: function %u in %zu bytes", session->stream, code, len);
	print_control(session, "received", bytes, len);
	bool answered = session->accepted || session->rejected;
	if (function == TERMINATE) {
		if (len > 2)
			die("session %u: a Terminate with private data", session->stream);
		session->terminated_there = true;
		if (!answered)
			/* Two ends that answer this could go on for ever. */
			session->rejected = session->terminated_here = true;
		else if (!session->terminated_here)
			end_session(session);
	} else if (answered || options.active == (function == INITIATE)) {
		die("session %u: function %u is out of turn", session->stream, code);
	} else if (function == INITIATE) {
		uint32_t word = 0;
		if (enhanced)
			memcpy(&word, bytes + 2, sizeof word);
		answer(session, enhanced, ntohl(word));
	} else if (function == ACCEPT) {
		if (enhanced != options.enhanced)
			die("session %u: an Accept in the other form", session->stream);
		session->accepted = true;
	} else {
		session->rejected = session->terminated_here = session->terminated_there = true;
	}
}

/* --- DDP segments (RFC 5041 §4), and the RDMAP messages that they carry (RFC 5040 §4). --- */

/* The memory that this STag and offset name. */
static uint8_t *memory_of(struct session *session, uint32_t stag, uint64_t to, size_t len)
{
	uint64_t at = to - OFFSET;
	if (stag != STAG(session) || at > sizeof session->memory || len > sizeof session->memory - at)
		die("session %u: STag %#x, offset %#" PRIx64 ", %zu bytes", session->stream, stag, to, len);
	return session->memory + at;
}

static void send_message(struct session *session, unsigned opcode, const void *data, size_t len)
{
	unsigned qn = opcode == READ_REQUEST ? QN_READ : QN_SEND;
	size_t most = longest - 2 - sizeof(struct untagged), mo = 0, now;
	uint32_t msn = ++session->msn_out[qn];
	do {
		now = len - mo < most ? len - mo : most;
		struct untagged header = {
			.ddp = DDP_VERSION | (mo + now == len ? LAST : 0),
			.rdmap = RDMAP_VERSION | opcode,
			.qn = htonl(qn),
			.msn = htonl(msn),
			.mo = htonl(mo),
		};
		send_chunk(session, SEGMENT, part(&header, sizeof header), part((const uint8_t *)data + mo, now));
		mo += now;
	} while (mo < len);
}

static void send_tagged(struct session *session, unsigned opcode, uint32_t stag, uint64_t to, struct iovec data)
{
	size_t most = longest - 2 - sizeof(struct tagged), at = 0, now;
	do {
		now = data.iov_len - at < most ? data.iov_len - at : most;
		struct tagged header = {
			.ddp = TAGGED | DDP_VERSION | (at + now == data.iov_len ? LAST : 0),
			.rdmap = RDMAP_VERSION | opcode,
			.stag = htonl(stag),
			.to = htobe64(to + at),
		};
		send_chunk(session, SEGMENT, part(&header, sizeof header), part((uint8_t *)data.iov_base + at, now));
		at += now;
	} while (at < data.iov_len);
}

/* Reads memory of the peer into the first half of this end's. */
static void send_read(struct session *session, uint32_t stag, uint64_t to, uint32_t len)
{
	struct read_request request = { htonl(STAG(session)), htobe64(OFFSET), htonl(len), htonl(stag), htobe64(to) };
	send_message(session, READ_REQUEST, &request, sizeof request);
}

/* A server of rping: reads the source that the first Send of a ping names, says so by a Send, and
 * writes the data to the sink that the second Send names. */
static void serve_ping(struct session *session)
{
	struct advertisement *far = &session->far;
	uint32_t len = ntohl(far->length);
	if (len > MESSAGE)
		die("session %u: a ping of %u bytes", session->stream, len);
	if (session->sends % 2) {
		send_read(session, ntohl(far->stag), be64toh(far->to), len);
		return;
	}
	send_tagged(session, WRITE, ntohl(far->stag), be64toh(far->to), part(session->memory, len));
	send_message(session, SEND, far, sizeof *far);
}

static void take_send(struct session *session)
{
	size_t len = session->have;
	session->sends++;
	bool same = len == options.size && is_filled(session->message, len, session->sends);
	printf("session %u: received Send %u of %zu bytes%s\n", session->stream, session->sends, len,
	       same ? ", as filled" : "");
	if (options.active)
		return;
	if (!options.rping) {
		send_message(session, SEND, session->message, len);
	} else if (len == sizeof session->far) {
		memcpy(&session->far, session->message, len);
		serve_ping(session);
	} else {
		die("session %u: rping does not send %zu bytes", session->stream, len);
	}
}

static void take_read_request(struct session *session)
{
	struct read_request request;
	if (session->have != sizeof request)
		die("session %u: a Read Request of %zu bytes", session->stream, session->have);
	memcpy(&request, session->message, sizeof request);
	uint32_t len = ntohl(request.length);
	printf("session %u: received Read Request for %u bytes\n", session->stream, len);
	const uint8_t *source = len ? memory_of(session, ntohl(request.source_stag), be64toh(request.source_to), len) : NULL;
	send_tagged(session, READ_RESPONSE, ntohl(request.sink_stag), be64toh(request.sink_to), part(source, len));
}

static void take_untagged(struct session *session, const uint8_t *bytes, size_t len)
{
	struct untagged header;
	if (len < sizeof header)
		die("session %u: an untagged segment of %zu bytes", session->stream, len);
	memcpy(&header, bytes, sizeof header);
	len -= sizeof header;
	uint32_t qn = ntohl(header.qn), msn = ntohl(header.msn), mo = ntohl(header.mo);
	unsigned opcode = header.rdmap & 0xf;
	if (opcode != (qn == QN_READ ? READ_REQUEST : SEND) || qn > QN_READ)
		die("session %u: RDMAP opcode %u on queue %u", session->stream, opcode, qn);
	if (msn != session->msn_in[qn] + 1 || mo != session->have || len > MESSAGE - mo)
		die("session %u: queue %u: MSN %u, offset %u, %zu bytes after MSN %u", session->stream, qn, msn, mo, len,
		    session->msn_in[qn]);
	memcpy(session->message + mo, bytes + sizeof header, len);
	session->have += len;
	if (!(header.ddp & LAST))
		return;
	session->msn_in[qn]++;
	if (qn == QN_READ)
		take_read_request(session);
	else
		take_send(session);
	session->have = 0;
}

static void take_tagged(struct session *session, const uint8_t *bytes, size_t len)
{
	struct tagged header;
	if (len < sizeof header)
		die("session %u: a tagged segment of %zu bytes", session->stream, len);
	memcpy(&header, bytes, sizeof header);
	len -= sizeof header;
	unsigned opcode = header.rdmap & 0xf;
	if (opcode != WRITE && opcode != READ_RESPONSE)
		die("session %u: RDMAP opcode %u is tagged", session->stream, opcode);
	if (len)
		memcpy(memory_of(session, ntohl(header.stag), be64toh(header.to), len), bytes + sizeof header, len);
	if (!(header.ddp & LAST))
		return;
	printf("session %u: received %s\n", session->stream, opcode == WRITE ? "Write" : "Read Response");
	session->reads += opcode == READ_RESPONSE;
	if (opcode == READ_RESPONSE && !options.active)
		send_message(session, SEND, &session->far, sizeof session->far);
}

static void take_segment(struct session *session, const uint8_t *bytes, size_t len)
{
	if (!session->accepted || session->terminated_there)
		die("session %u: a segment outside of the session", session->stream);
	if (len < 2 || (bytes[0] & ~(TAGGED | LAST)) != DDP_VERSION || (bytes[1] & 0xf0) != RDMAP_VERSION)
		die("session %u: versions or reserved bits of a segment of %zu bytes", session->stream, len);
	if (bytes[0] & TAGGED)
		take_tagged(session, bytes, len);
	else
		take_untagged(session, bytes, len);
}

/* Takes a chunk from the socket, and handles the chunks whose turn has come. Returns whether there
 * was one. */
static bool take(int flags)
{
	struct session *session = receive_chunk(flags);
	if (!session)
		return false;
	for (struct chunk **next; *(next = &session->waiting[session->ssn_in % WAITING]); session->ssn_in++) {
		struct chunk *chunk = *next;
		if (chunk->ppid == SEGMENT)
			take_segment(session, chunk->bytes, chunk->len);
		else
			take_control(session, chunk->bytes, chunk->len);
		free(chunk);
		*next = NULL;
		if (session->terminated_here && session->terminated_there) {
			session->ended++;
			ended++;
			if (!options.active)
				begin_anew(session);
			break;
		}
	}
	return true;
}

/* --- The two roles. --- */

#define FOR_EACH(session) for (struct session *session = sessions; session < sessions + options.sessions; session++)

/* Waits until this holds for each session that is not rejected. */
#define EACH(condition)                                                                                               \
	FOR_EACH(session)                                                                                             \
		while (!session->rejected && !(condition)) {                                                          \
			if (session->terminated_there)                                                                \
				die("session %u: ended by the peer", session->stream);                                \
			take(0);                                                                                      \
		}

static void exchange_sends(void)
{
	static uint8_t data[MESSAGE];
	for (int n = 1; n <= options.sends; n++) {
		fill(data, options.size, n);
		EACH((int)session->sends + WINDOW >= n)
		FOR_EACH(session) {
			if (!session->rejected)
				send_message(session, SEND, data, options.size);
			/* The peer can send only while its own messages are taken. */
			while (take(MSG_DONTWAIT))
				;
		}
	}
	EACH(session->sends == (unsigned)options.sends)
}

/* Both halves of the peer's memory have the same names as those of this end's. */
static void write_and_read(void)
{
	static uint8_t data[MESSAGE];
	fill(data, options.size, 0);
	FOR_EACH(session) {
		if (session->rejected)
			continue;
		send_tagged(session, WRITE, STAG(session), OFFSET + MESSAGE, part(data, options.size));
		send_read(session, STAG(session), OFFSET + MESSAGE, options.size);
	}
	EACH(session->reads == 1)
	FOR_EACH(session) {
		if (session->rejected)
			continue;
		verify(session->memory, options.size, 0);
		printf("session %u: read what was written\n", session->stream);
	}
}

/* A client of rping: the server reads from the first half of the memory, and writes to the
 * second. */
static void ping(struct session *session, unsigned number)
{
	uint8_t *source = session->memory, *sink = session->memory + MESSAGE;
	struct advertisement here = { htobe64(OFFSET), htonl(STAG(session)), htonl(options.size) };
	unsigned sends = session->sends;
	/* A string: rping writes back as much as it takes for one. */
	fill(source, options.size, number);
	for (size_t at = 0; at < options.size; at++)
		source[at] = at + 1 < options.size ? 'a' + source[at] % 26 : 0;
	send_message(session, SEND, &here, sizeof here);
	while (session->sends == sends)
		take(0);
	here.to = htobe64(OFFSET + MESSAGE);
	send_message(session, SEND, &here, sizeof here);
	while (session->sends == sends + 1)
		take(0);
	if (memcmp(source, sink, options.size))
		die("session %u: ping %u comes back with other bytes", session->stream, number);
	printf("session %u: ping %u is well\n", session->stream, number);
}

static bool any_accepted(void)
{
	FOR_EACH(session)
		if (session->accepted)
			return true;
	return false;
}

static void act(int round)
{
	FOR_EACH(session) {
		begin_anew(session);
		send_control(session, INITIATE, options.enhanced, DEPTH << 16 | DEPTH, "asked by the kernel");
	}
	EACH(session->accepted)
	if (!any_accepted())
		return;
	if (options.rping) {
		for (int number = 0; number < options.rping; number++)
			FOR_EACH(session)
				if (!session->rejected)
					ping(session, number);
	} else {
		exchange_sends();
		if (options.tagged)
			write_and_read();
	}
	FOR_EACH(session)
		if (!session->terminated_here)
			end_session(session);
	EACH(session->ended > round)
}

static void be_acted_upon(void)
{
	while (ended < options.sessions * options.rounds)
		take(0);
}

/* Ends the association in order, after all that was sent. A peer that has gone does not answer;
 * the kernel goes on to ask it. */
static void end_association(void)
{
	struct timeval patience = { .tv_sec = 5 };
	char byte;
	ZERO(setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience));
	ZERO(shutdown(sock, SHUT_WR));
	ssize_t len = recv(sock, &byte, 1, 0);
	/* ENOTCONN: it has ended before. */
	bool ended = !len || (len < 0 && errno == ENOTCONN);
	printf("association: %s\n", ended ? "ended" : len > 0 ? "a chunk at its end" : strerror(errno));
}

/* Takes the option at `words`; returns how many words it has. */
static int take_option(char **words)
{
	const struct {
		const char *name;
		bool *flag;
		int *number;
	} known[] = {
		{ "enhanced", .flag = &options.enhanced }, { "tagged", .flag = &options.tagged },
		{ "reject", .flag = &options.reject },	   { "ordered", .flag = &options.ordered },
		{ "encap", .number = &options.encap },
		{ "adaptation", .number = &options.adaptation }, { "sessions", .number = &options.sessions },
		{ "rounds", .number = &options.rounds }, { "sends", .number = &options.sends },
		{ "rping", .number = &options.rping },
	};
	for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
		if (strcmp(*words, known[i].name))
			continue;
		if (known[i].flag)
			*known[i].flag = true;
		else if (words[1])
			*known[i].number = atoi(words[1]);
		return known[i].flag ? 1 : 2;
	}
	if (strcmp(*words, "size") || !words[1])
		die("unknown: %s", *words);
	options.size = strtoull(words[1], NULL, 0);
	return 2;
}

int main(int argc, char **argv)
{
	options.active = argc > 3 && !strcmp(argv[1], "active");
	bool passive = argc > 2 && !strcmp(argv[1], "passive");
	if (!options.active && !passive)
		die("sctp_peer active ADDRESS PORT [OPTION...], or passive PORT [OPTION...]");
	setlinebuf(stdout);
	for (int at = options.active ? 4 : 3; at < argc;)
		at += take_option(argv + at);
	if (options.sessions < 1 || options.sessions > SESSIONS || options.size > MESSAGE)
		die("at most %d sessions, and %d bytes", SESSIONS, MESSAGE);
	for (int n = 0; n < SESSIONS; n++)
		sessions[n].stream = n;
	alarm(LIMIT);
	associate(options.active ? argv[2] : NULL, argv[options.active ? 3 : 2]);
	for (int round = 0; options.active && round < options.rounds; round++)
		act(round);
	if (!options.active)
		be_acted_upon();
	end_association();
	return 0;
}
