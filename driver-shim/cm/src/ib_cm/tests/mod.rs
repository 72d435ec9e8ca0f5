//! Tests of the communication manager. They use no network and no clock.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions, not in what they share"
)]

mod hostile;
mod messages;
mod network;
mod states;
mod transitions;

use std::net::IpAddr;
use std::time::Duration;

use urnic_wire::mad::{ConnectRequest, Mad, Message, service_id};

use super::*;
use crate::mpa_startup::Time;

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 2, 3));
const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 2, 4));
const START: Time = Duration::from_secs(100);
const CLIENT_QPN: u32 = 0x11;
const SERVER_QPN: u32 = 0x22;

/// Numbers that differ, from a seed.
fn random(seed: u64) -> impl FnMut() -> u64 + Send {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    }
}

fn settings(ca_guid: u64) -> Settings {
    Settings {
        ca_guid,
        ..Settings::default()
    }
}

fn connect() -> Connect {
    Connect {
        service_id: service_id(0x0106, 7471),
        source_port: 0x8001,
        qpn: CLIENT_QPN,
        responder_resources: 4,
        initiator_depth: 9,
        flow_control: true,
        retry_count: 6,
        rnr_retry_count: 5,
        srq: false,
        traffic_class: 0x20,
        ack_timeout: None,
        private_data: b"hello".to_vec(),
    }
}

fn accept() -> Accept {
    Accept {
        qpn: SERVER_QPN,
        responder_resources: 3,
        initiator_depth: 8,
        flow_control: false,
        rnr_retry_count: 7,
        srq: true,
        private_data: b"welcome".to_vec(),
    }
}

/// One end, and what it did.
struct End {
    connections: Connections,
    route: Route,
    admission: Admission,
    now: Time,
    sent: Vec<Mad>,
    events: Vec<(u32, Event)>,
}

impl End {
    fn new(settings: Settings, local: IpAddr, remote: IpAddr) -> End {
        let seed = settings.ca_guid;
        End {
            connections: Connections::new(settings, Box::new(random(seed))),
            route: Route::new(local, remote),
            admission: Admission::Shown,
            now: START,
            sent: Vec::new(),
            events: Vec::new(),
        }
    }

    fn client() -> End {
        End::new(settings(0xc), CLIENT, SERVER)
    }

    fn server() -> End {
        End::new(settings(0x5), SERVER, CLIENT)
    }

    /// Collects what came out.
    fn drain(&mut self) {
        while let Some(output) = self.connections.next_output() {
            match output {
                Output::Send(_, mad) => self.sent.push(*mad),
                Output::Event(id, event) => self.events.push((id, event)),
            }
        }
    }

    fn receive(&mut self, mad: &Mad) {
        self.receive_by(self.route, mad);
    }

    fn receive_by(&mut self, route: Route, mad: &Mad) {
        let admission = self.admission;
        self.connections
            .receive(self.now, route, mad, &mut |_, _| admission);
        self.drain();
    }

    /// Lets time pass; all timers of it expire.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(at) = self.connections.deadline()
            && at <= until
        {
            self.now = self.now.max(at);
            self.connections.expire(self.now);
            self.drain();
        }
        self.now = until;
    }

    fn connect(&mut self) -> u32 {
        let id = self
            .connections
            .connect(self.now, self.route, &connect())
            .unwrap();
        self.drain();
        id
    }

    fn accept(&mut self, id: u32) {
        self.connections.accept(self.now, id, &accept()).unwrap();
        self.drain();
    }

    fn ready(&mut self, id: u32) {
        self.connections.ready(id, b"").unwrap();
        self.drain();
    }

    /// The messages since the last call, as words.
    fn said(&mut self) -> Vec<&'static str> {
        self.sent.drain(..).map(|mad| word(&mad)).collect()
    }

    /// The only message since the last call.
    #[track_caller]
    fn only(&mut self) -> Mad {
        let sent: Vec<_> = self.sent.drain(..).collect();
        assert_eq!(sent.len(), 1, "{sent:?}");
        sent[0]
    }

    /// The only event since the last call.
    #[track_caller]
    fn event(&mut self) -> (u32, Event) {
        let mut events: Vec<_> = self.events.drain(..).collect();
        assert_eq!(events.len(), 1, "{events:?}");
        events.remove(0)
    }

    fn state(&self, id: u32) -> Option<State> {
        self.connections.state(id)
    }
}

fn word(mad: &Mad) -> &'static str {
    match &mad.message {
        Message::Connect(_) => "REQ",
        Message::Receipt(_) => "MRA",
        Message::Reject(_) => "REJ",
        Message::ConnectReply(_) => "REP",
        Message::Ready(_) => "RTU",
        Message::Disconnect(_) => "DREQ",
        Message::DisconnectReply(_) => "DREP",
        Message::Request(_) | Message::Reply(_) => "SIDR",
    }
}

/// What a program learns of an event.
fn name(event: &Event) -> &'static str {
    match event {
        Event::Requested(_) => "CONNECT_REQUEST",
        Event::Accepted(_) => "CONNECT_RESPONSE",
        Event::Established(_) => "ESTABLISHED",
        Event::Rejected { .. } => "REJECTED",
        Event::Unreachable => "UNREACHABLE",
        Event::Disconnected { .. } => "DISCONNECTED",
        Event::TimeWaitExit => "TIMEWAIT_EXIT",
    }
}

fn request_of(mad: &Mad) -> ConnectRequest {
    match mad.message {
        Message::Connect(request) => request,
        _ => panic!("{mad}"),
    }
}

/// A client and a server, and the numbers of their connection, in these states.
struct Pair {
    client: End,
    server: End,
    active: u32,
    passive: u32,
}

impl Pair {
    /// REQ sent, and received.
    fn requested() -> Pair {
        let (mut client, mut server) = (End::client(), End::server());
        let active = client.connect();
        server.receive(&client.only());
        let (passive, _) = server.event();
        Pair {
            client,
            server,
            active,
            passive,
        }
    }

    /// REP sent, and received.
    fn replied() -> Pair {
        let mut pair = Pair::requested();
        pair.server.accept(pair.passive);
        pair.client.receive(&pair.server.only());
        pair.client.event();
        pair
    }

    /// Established at both ends.
    fn established() -> Pair {
        let mut pair = Pair::replied();
        pair.client.ready(pair.active);
        pair.server.receive(&pair.client.only());
        pair.server.event();
        pair
    }

    /// DREQ sent by the client, and not received.
    fn disconnecting() -> Pair {
        let mut pair = Pair::established();
        let Pair { client, active, .. } = &mut pair;
        client.connections.disconnect(client.now, *active).unwrap();
        client.drain();
        pair
    }

    /// TimeWait at both ends.
    fn ended() -> Pair {
        let mut pair = Pair::disconnecting();
        pair.server.receive(&pair.client.only());
        pair.client.receive(&pair.server.only());
        pair.client.event();
        pair.server.event();
        pair
    }
}
