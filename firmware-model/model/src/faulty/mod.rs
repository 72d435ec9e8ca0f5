//! A network with faults: connections and UDP ports query the plan of the process
//! ([`urnic_faults`]) for faults, and carry them out. The device above does not know of it.

mod datagrams;
mod last_words;
mod line;
mod silence;
mod stream;
#[cfg(test)]
mod tests;

use crate::stream::datagram::{DatagramOptions, DatagramSocket};
use crate::stream::wrapper::WrappedListener;
use crate::stream::{Listener, Network, Stream};
use datagrams::FaultySocket;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use stream::{Condition, FaultyStream};
use urnic_faults::{ConnectFault, DevicePlan, Plan, occasion};

/// A network with its faults.
#[derive(Debug)]
pub(crate) struct Faulty {
    network: Arc<dyn Network>,
    plan: DevicePlan,
}

impl Faulty {
    /// `device` is its name in the plan.
    pub(crate) fn new(network: Arc<dyn Network>, plan: &'static Plan, device: &str) -> Faulty {
        plan.note_network();
        Faulty {
            network,
            plan: DevicePlan::new(plan, device),
        }
    }
}

impl Network for Faulty {
    fn connect(
        &self,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        traffic_class: u8,
    ) -> Result<Box<dyn Stream>, Errno> {
        let strikes = self.plan.strikes(&occasion::connect(remote.ip()));
        let condition = match strikes.into_iter().min() {
            Some(ConnectFault::Refuse) => return Err(Errno::CONNREFUSED),
            Some(ConnectFault::Unreachable) => return Err(Errno::NETUNREACH),
            Some(ConnectFault::Unanswered) => Condition::Unanswered,
            Some(ConnectFault::Reject) => Condition::Rejecting,
            None => Condition::Well,
        };
        if self.plan.port_down_for().is_some() {
            return Err(Errno::NETUNREACH);
        }
        let stream = self.network.connect(remote, local, traffic_class)?;
        Ok(Box::new(FaultyStream::new(stream, self.plan.clone(), condition)))
    }

    fn listen(
        &self,
        local: SocketAddr,
        backlog: u32,
        traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<Box<dyn Listener>, Errno> {
        let listener = self.network.listen(local, backlog, traffic_class, ipv6_only)?;
        let plan = self.plan.clone();
        let wrap = move |stream| -> Box<dyn Stream> {
            Box::new(FaultyStream::new(stream, plan.clone(), Condition::Well))
        };
        Ok(Box::new(WrappedListener { listener, wrap }))
    }

    fn bind_datagrams(
        &self,
        local: SocketAddr,
        options: DatagramOptions,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        let socket = self.network.bind_datagrams(local, options)?;
        Ok(Box::new(FaultySocket::new(socket, self.plan.clone())))
    }
}
