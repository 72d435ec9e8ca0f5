//! Connections of queue pairs that speak RoCE v2: there is nothing to set up with the peer, only
//! the attributes of `ibv_modify_qp` to be told to the device.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use rustix::io::Errno;
use urnic_cm::qp_attr::QpAttr;
use urnic_config::Wire;
use urnic_device::command::{Opcode, create_qp};
use urnic_device::stream::{Path, Retries};

use crate::driver::{Driver, Qp};
use crate::refusal::{Reason, Refusal};

/// Bytes of the MTU with `enum ibv_mtu` 1.
const MTU_256: u32 = 128;

impl Driver {
    /// The rule of new queue pairs ([`create_qp::ROCE`]), if they speak RoCE v2.
    pub(crate) fn wire_rule(&self) -> u32 {
        match self.speaks_roce() {
            true => create_qp::ROCE,
            false => 0,
        }
    }

    /// Whether the wire is that of RoCE v2.
    pub(crate) fn speaks_roce(&self) -> bool {
        self.identity().is_roce() && self.config().wire == Wire::Roce
    }

    /// The refusal of a queue pair that the device could not create for this reason.
    pub(crate) fn wire_refusal(&self, errno: Errno) -> Refusal {
        match errno {
            Errno::ADDRINUSE if self.speaks_roce() => {
                Reason::Rule("another process, rdma_rxe or an adapter has UDP port 4791 (wire=roce)")
                    .with(errno)
            }
            errno => errno.into(),
        }
    }
}

impl Qp {
    /// Names the peer to the device, before the change to RTR.
    pub(crate) fn connect_path(&self, attr: &QpAttr) -> Result<(), Refusal> {
        let driver = self.driver();
        let mtu = MTU_256.checked_shl(attr.path_mtu).unwrap_or(0);
        if self.max_mtu != 0 && mtu > self.max_mtu {
            return Err(Reason::Invalid {
                argument: "path_mtu",
                given: attr.path_mtu.into(),
                valid: "the port's active_mtu, or less",
            }
            .invalid());
        }
        let to = driver.destination(&attr.av)?;
        let remote: SocketAddr = match to.ip {
            IpAddr::V6(ip) => SocketAddrV6::new(ip, 0, 0, to.scope).into(),
            ip => SocketAddr::new(ip, 0),
        };
        let path = Path {
            remote: remote.into(),
            qid: self.qid.into(),
            source: u32::from(to.source).into(),
            remote_qpn: attr.dest_qpn.into(),
            psn: attr.rq_psn.into(),
            mtu: mtu.into(),
            min_rnr_timer: u32::from(attr.min_rnr_timer).into(),
            reads: u32::from(attr.max_dest_rd_atomic).into(),
            traffic_class: u32::from(to.traffic_class).into(),
        };
        Ok(driver.commands().run(Opcode::ConnectPath, &path)?)
    }

    /// Lets the device send requests, before the change to RTS.
    pub(crate) fn start_path(&self, attr: &QpAttr) -> Result<(), Errno> {
        let retries = Retries {
            qid: self.qid.into(),
            psn: attr.sq_psn.into(),
            timeout: u32::from(attr.timeout).into(),
            retry_cnt: u32::from(attr.retry_cnt).into(),
            rnr_retry: u32::from(attr.rnr_retry).into(),
            reads: u32::from(attr.max_rd_atomic).into(),
        };
        self.driver().commands().run(Opcode::StartPath, &retries)
    }
}
