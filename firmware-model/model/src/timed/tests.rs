//! Messages of a simulated connection are reported once, at both ends.

use super::{Observer, Passed, Timed};
use crate::stream::{Network, QpNumbers, Stream};
use crate::testing::sim::{Conditions, SimNetwork};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use urnic_sync::Mutex;
use urnic_wire::mpa::fpdu::{self, CrcMode};
use urnic_wire::rdmap::Opcode;

#[derive(Debug, Default)]
struct Log(Mutex<Vec<Passed>>);

impl Observer for Log {
    fn passed(&self, message: Passed) {
        self.0.lock().push(message);
    }
}

/// The observers of all tests: a network has its observer for ever, as a process has.
static LOGS: Mutex<Vec<&'static Log>> = Mutex::new(Vec::new());

/// A Send of 12 bytes.
fn message() -> Vec<u8> {
    let mut buffer = [0; 64];
    let ulpdu = [&[0x41, 0x43][..], &[0; 28]].concat();
    let len = fpdu::emit(&ulpdu, CrcMode::On, &mut buffer);
    buffer[..len].to_vec()
}

#[test]
fn messages_are_reported_at_both_ends() {
    let log: &'static Log = Box::leak(Box::default());
    LOGS.lock().push(log);
    let conditions = Conditions {
        latency: Duration::ZERO,
        ..Conditions::default()
    };
    let network = Timed::new(Arc::new(SimNetwork::new(conditions, Arc::default())), log);
    let address: SocketAddr = "192.0.2.1:7471".parse().unwrap();
    let mut listener = network.listen(address, 1, 0, false).unwrap();
    let mut here = network.connect(address, None, 0).unwrap();
    let mut there = listener.accept().unwrap().expect("a connection");
    let pass = |from: &mut dyn Stream, to: &mut dyn Stream, bytes: &[u8]| {
        assert_eq!(from.send_bytes(bytes), Ok(bytes.len()));
        let mut into = vec![0; bytes.len()];
        assert_eq!(to.receive_bytes(&mut into), Ok(bytes.len()));
        assert_eq!(into, bytes);
    };
    pass(&mut *here, &mut *there, b"MPA ID Req Frame\x40\x01\x00\x00");
    pass(&mut *there, &mut *here, b"MPA ID Rep Frame\x40\x01\x00\x00");
    let numbers = |label| QpNumbers { id: label, label };
    let [mut here, mut there] =
        [(here, 1), (there, 2)].map(|(end, label)| end.enter_full_operation(numbers(label)).stream);
    pass(&mut *here, &mut *there, &message());
    let reports = log.0.lock();
    let seen: Vec<_> = reports
        .iter()
        .map(|passed| (passed.qpn, passed.sent, passed.opcode, passed.bytes))
        .collect();
    assert_eq!(seen, [(1, true, Opcode::Send, 12), (2, false, Opcode::Send, 12)]);
    assert!(reports.iter().all(|passed| passed.first <= passed.last));
}
