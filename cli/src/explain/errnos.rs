//! Error numbers of verbs and librdmacm, and their meaning with this device: as in
//! `docs/reference/statuses.md`.

/// A name, and its meaning.
pub(super) const ERRNOS: [(&str, &str); 22] = [
    (
        "EINVAL",
        "an argument is not valid: a size or count beyond what `ibv_query_device` reports, a transition that the queue pair's state does not permit or that lacks an attribute, an unknown flag, an object of another context or whose handle the program changed, a request that is inline and too long, a post in a state without posting; rdma_cm: a call in a state of the id that does not permit it",
    ),
    (
        "ENOMEM",
        "posting: the queue is full, poll completions first; else no memory is left, or the device has no room for one more object",
    ),
    (
        "EBUSY",
        "the object is still used: a domain with queue pairs, shared receive queues, regions, windows or address handles, a completion or shared receive queue with queue pairs, a region with bound windows; VFIO: another process has the function",
    ),
    (
        "EIO",
        "a forked child uses an object of its parent, or the device is lost",
    ),
    (
        "EOPNOTSUPP",
        "the device does not have this kind of queue pair, operation or attribute; with `--identity roce` there are UC and UD, too; `ibv_reg_dmabuf_mr` of a file that cannot be mapped, or without one; `ibv_advise_mr` of a region that is not on demand",
    ),
    (
        "ENOENT",
        "there is no such object: another context removed it, the program changed the handle of what it destroys, or an id of rdma_cm is gone; polling `ibv_cq_ex`: no completion is there",
    ),
    ("EFAULT", "an address in a call is not mapped"),
    ("EBADF", "the descriptor is closed, or of another kind"),
    (
        "ENODEV",
        "no usable device: the name is unknown, or `urnic run` is missing; rdma_cm: the address belongs to no device",
    ),
    (
        "EMFILE",
        "the process has no descriptor left; each connection takes one: `ulimit -n \"$(ulimit -Hn)\"`",
    ),
    (
        "EAGAIN",
        "the channel does not block, and no event is there; opening the device: no more threads may be started (`ulimit -u`)",
    ),
    (
        "EACCES",
        "the kernel or a security module refuses: a port below 1024, a VFIO file of another user",
    ),
    (
        "EPERM",
        "the kernel refuses: a seccomp profile, or memory that may not be locked",
    ),
    (
        "EADDRINUSE",
        "another socket or id has the port; with `--identity iwarp` a listener of rdma_cm needs the TCP port of its number (`cm.ports`)",
    ),
    (
        "EADDRNOTAVAIL",
        "the address does not belong to this host, or to none of its devices; or no port is free",
    ),
    (
        "ENETUNREACH",
        "no route leads to the address; with `--identity roce` also `ibv_modify_qp` to RTR and `ibv_create_ah`",
    ),
    (
        "EHOSTUNREACH",
        "a route of this host refuses the address, or the network reports that no host has it; with `--identity roce` also `ibv_modify_qp` to RTR and `ibv_create_ah`",
    ),
    (
        "ECONNREFUSED",
        "no process listens at the peer's address and port, or the peer rejected the connection (`rdma_reject`)",
    ),
    (
        "ECONNRESET",
        "the peer ended the connection before it was established, or its process ended",
    ),
    (
        "ETIMEDOUT",
        "`ibv_modify_qp` to RTR and `ibv_create_ah` with `--identity roce`: no host answers for the GID within a second. In other calls: no answer came in time: a firewall, a wrong address, or a peer that does not accept (`mpa.startup_timeout_initiator_s`)",
    ),
    (
        "EPROTO",
        "the peer at this port does not speak MPA, or breaks its start-up",
    ),
    ("EINTR", "a signal interrupted the call"),
];
