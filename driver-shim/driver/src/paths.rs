//! Connections of queue pairs that speak RoCE v2: there is nothing to set up with the peer, only
//! the attributes of `ibv_modify_qp` to be told to the device.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use rustix::io::Errno;
use urnic_cm::qp_attr::{MANAGER_QPN, QpAttr};
use urnic_config::Wire;
use urnic_device::command::Opcode;
use urnic_device::stream::{Path, Retries};
use urnic_process::port_gids::ip_of;

use crate::driver::{Driver, Qp};
use crate::refusal::{Reason, Refusal};

/// Bytes of the MTU with `enum ibv_mtu` 1.
const MTU_256: u32 = 128;

impl Driver {
    /// Whether a new queue pair of kind UD sends and receives at the port of RoCE v2, which is so
    /// for all its peers.
    pub(crate) fn has_roce_datagrams(&self) -> bool {
        self.identity().is_roce() && self.config().wire == Wire::Roce
    }

    /// Whether connected queue pairs may speak RoCE v2: then queue pair 1 has the messages of their
    /// connection manager.
    pub(crate) fn has_roce_connections(&self) -> bool {
        self.config().speaks_roce_to_some()
    }
}

impl Qp {
    /// Whether a connected queue pair speaks RoCE v2 to the peer of these attributes.
    pub(crate) fn is_for_roce(&self, attr: &QpAttr) -> bool {
        let config = self.driver().config();
        attr.dest_qpn != MANAGER_QPN && config.speaks_roce_to(ip_of(&attr.av.dgid))
    }

    /// Names the peer to the device, before the change to RTR. The queue pair speaks RoCE v2 from
    /// now on.
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
        driver
            .commands()
            .run(Opcode::ConnectPath, &path)
            .map_err(Refusal::of_roce_port)?;
        tracing::debug!("{self:?}: speaks RoCE v2 to {}", to.ip);
        Ok(())
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
