//! Raw TCP and UDP, used as efficiently as a program can: the reference for urnic. Each end is a
//! separate process, as perftest's ends are.

use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use urnic_tests::{Pair, Program};

use crate::place::Place;

/// Exchanges in a ping-pong, and in the warm-up before it, which is not counted.
const EXCHANGES: usize = 20_000;
const WARM_UP: usize = 2_000;

/// The other segment of each way of a ping-pong with two: as an FPDU of a message without payload.
const SECOND: usize = 24;

/// Datagrams that go to the kernel in one piece, bytes on their way, and the time after which what
/// did not arrive is lost.
const SEGMENTS: usize = 16;
const WINDOW: u64 = 128 << 10;
const PATIENCE: Duration = Duration::from_millis(2);

/// The number of connections, established one after the other.
const CONNECTS: usize = 5_000;

/// Times of half round trips in microseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Latency {
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) mean: f64,
}

/// This program as an end: `raw ARGS`.
pub(crate) fn program(args: &str) -> Program {
    let program = std::env::current_exe().expect("the path of this program");
    Program::plain(program).arg("raw").line(args)
}

fn pair(place: &Place, args: &str) -> Pair {
    place.pair(&program(args)).within(Duration::from_secs(120))
}

/// The numbers on the last line that the client printed.
fn numbers(pair: &Pair) -> Vec<f64> {
    let text = pair.succeeds().client.success();
    text.split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect()
}

/// A ping-pong of `size` bytes in which both sides `spin` on a non-blocking socket; `two`: with a
/// further segment each way; `udp`: on UDP sockets.
pub(crate) fn ping_pong(place: &Place, mode: &str, size: usize) -> Latency {
    match numbers(&pair(place, &format!("{mode} {size} {EXCHANGES}"))).as_slice() {
        [median, p99, mean] => Latency {
            median: *median,
            p99: *p99,
            mean: *mean,
        },
        other => panic!("raw {mode} printed {other:?}"),
    }
}

/// A stream of `count` writes of `size` bytes, in MiB/s: a `stream` as iperf3 makes it, or one with
/// `nodelay`; `segments`: what arrives of datagrams of this size, which the kernel divides and
/// joins (UDP GSO and GRO).
pub(crate) fn stream(place: &Place, mode: &str, size: usize, count: u64) -> f64 {
    match numbers(&pair(place, &format!("{mode} {size} {count}"))).as_slice() {
        [rate] => *rate,
        other => panic!("raw {mode} printed {other:?}"),
    }
}

/// TCP connections that one process establishes to another, one after the other; none is closed
/// before the end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Connects {
    pub(crate) per_second: f64,
    /// Median time from connect(2) to the peer's first byte, in microseconds.
    pub(crate) median: f64,
}

/// Establishes [`CONNECTS`] connections.
pub(crate) fn connects(place: &Place) -> Connects {
    match numbers(&pair(place, "connect")).as_slice() {
        [per_second, median] => Connects {
            per_second: *per_second,
            median: *median,
        },
        other => panic!("raw connect printed {other:?}"),
    }
}

/// One end: `raw KIND … -p PORT [HOST]`.
pub(crate) fn main(args: &[&str]) -> ExitCode {
    match end(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            urnic_console::complain("raw", &error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn end(args: &[&str]) -> Result<(), Box<dyn std::error::Error>> {
    let usage = "usage: raw connect | spin|two|udp|stream|nodelay|segments SIZE COUNT, then -p PORT [HOST]";
    let at = args.iter().position(|arg| *arg == "-p").ok_or(usage)?;
    let (what, rest) = args.split_at(at);
    let kind = *what.first().ok_or(usage)?;
    let port: u16 = rest.get(1).ok_or(usage)?.parse()?;
    let host = rest.get(2);
    let meet = || -> std::io::Result<TcpStream> {
        let stream = match host {
            Some(host) => TcpStream::connect((*host, port))?,
            None => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?.accept()?.0,
        };
        stream.set_nodelay(kind != "stream")?;
        Ok(stream)
    };
    match what {
        ["connect"] => Ok(connect(host.unwrap_or(&""), port)?),
        ["spin" | "two", size, count] => {
            let stream = meet()?;
            stream.set_nonblocking(true)?;
            let second = if kind == "two" { SECOND } else { 0 };
            let (end, size) = (over_tcp(stream, second), second + size.parse::<usize>()?);
            Ok(exchange(end, size, count.parse()?, host.is_some())?)
        }
        ["udp", size, count] => {
            let end = over_udp(meet()?)?;
            Ok(exchange(end, size.parse()?, count.parse()?, host.is_some())?)
        }
        ["segments", size, count] => Ok(segments(meet()?, host.is_some(), size.parse()?, count.parse()?)?),
        ["stream" | "nodelay", size, count] => {
            Ok(flow(meet()?, host.is_some(), size.parse()?, count.parse()?)?)
        }
        _ => Err(usage.into()),
    }
}

/// Fills `buffer`; on a non-blocking stream it retries immediately.
fn read_all(stream: &mut TcpStream, buffer: &mut [u8]) -> std::io::Result<()> {
    let mut have = 0;
    while have < buffer.len() {
        match stream.read(&mut buffer[have..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => have += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Prints the figures of an end that measured.
fn print_figures(figures: &str) -> std::io::Result<()> {
    urnic_console::print(figures).map_err(std::io::Error::other)
}

/// The role of an end of a ping-pong.
enum Step {
    Send,
    Receive,
}

/// Both ends spin on a TCP connection; the first `second` bytes of a ping are a segment of their
/// own.
fn over_tcp(mut stream: TcpStream, second: usize) -> impl FnMut(Step, &mut [u8]) -> std::io::Result<()> {
    move |step, ping| match step {
        Step::Send => {
            let (first, rest) = ping.split_at(second);
            stream.write_all(first)?;
            stream.write_all(rest)
        }
        Step::Receive => read_all(&mut stream, ping),
    }
}

/// A UDP port that is connected to one of the peer's; they exchange them over `stream`.
fn udp(stream: &mut TcpStream) -> std::io::Result<UdpSocket> {
    let socket = UdpSocket::bind((stream.local_addr()?.ip(), 0))?;
    stream.write_all(&socket.local_addr()?.port().to_be_bytes())?;
    let mut port = [0; 2];
    stream.read_exact(&mut port)?;
    socket.connect((stream.peer_addr()?.ip(), u16::from_be_bytes(port)))?;
    // The peer is connected, too, before a datagram comes.
    stream.write_all(&[0])?;
    stream.read_exact(&mut [0])?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Both ends spin on UDP ports.
fn over_udp(mut stream: TcpStream) -> std::io::Result<impl FnMut(Step, &mut [u8]) -> std::io::Result<()>> {
    let socket = udp(&mut stream)?;
    Ok(move |step, ping: &mut [u8]| match step {
        Step::Send => socket.send(ping).map(|_| ()),
        Step::Receive => loop {
            match socket.recv(ping) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
                received => return received.map(|_| ()),
            }
        },
    })
}

fn exchange(
    mut end: impl FnMut(Step, &mut [u8]) -> std::io::Result<()>,
    size: usize,
    count: usize,
    first: bool,
) -> std::io::Result<()> {
    let mut ping = vec![0; size];
    let mut times = Vec::with_capacity(WARM_UP + count);
    for _ in 0..WARM_UP + count {
        let start = Instant::now();
        if first {
            end(Step::Send, &mut ping)?;
        }
        end(Step::Receive, &mut ping)?;
        if !first {
            end(Step::Send, &mut ping)?;
        }
        times.push(start.elapsed());
    }
    if first {
        let counted = &mut times[WARM_UP..];
        counted.sort_unstable();
        let half_us = |at: usize| counted[at].as_secs_f64() * 1e6 / 2.0;
        let mean = counted.iter().sum::<Duration>().as_secs_f64() * 1e6 / 2.0 / count as f64;
        let (median, p99) = (half_us(count / 2), half_us(count * 99 / 100));
        print_figures(&format!("{median} {p99} {mean}\n"))?;
    }
    Ok(())
}

fn flow(mut stream: TcpStream, sends: bool, size: usize, count: u64) -> std::io::Result<()> {
    let mut buffer = vec![0x5a; size];
    let mut done = [0];
    if !sends {
        for _ in 0..count {
            stream.read_exact(&mut buffer)?;
        }
        return stream.write_all(&done);
    }
    let start = Instant::now();
    for _ in 0..count {
        stream.write_all(&buffer)?;
    }
    // The clock runs until the peer has received everything.
    stream.read_exact(&mut done)?;
    let mebibytes = size as f64 * count as f64 / f64::from(1 << 20);
    print_figures(&format!("{}\n", mebibytes / start.elapsed().as_secs_f64()))?;
    Ok(())
}

/// Sends `count` datagrams of `size` bytes, or counts those that arrive. The receiver tells how
/// many bytes it has, so that no more are on their way than it has room for.
fn segments(mut stream: TcpStream, sends: bool, size: usize, count: u64) -> std::io::Result<()> {
    let socket = udp(&mut stream)?;
    let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
    match sends {
        true => {
            send_segments(&socket, &state, size, count)?;
            stream.write_all(&[0])?;
            let mut rate = [0; 8];
            stream.read_exact(&mut rate)?;
            print_figures(&format!("{}\n", f64::from_be_bytes(rate)))
        }
        false => {
            let rate = count_segments(&socket, &state, &mut stream)?;
            stream.write_all(&rate.to_be_bytes())
        }
    }
}

/// Nothing, if a call would have to wait.
fn at_once(done: std::io::Result<usize>) -> std::io::Result<usize> {
    match done {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        done => done,
    }
}

fn send_segments(socket: &UdpSocket, state: &UdpSocketState, size: usize, count: u64) -> std::io::Result<()> {
    let contents = vec![0x5a; SEGMENTS * size];
    let transmit = Transmit {
        destination: socket.peer_addr()?,
        ecn: None,
        contents: &contents,
        segment_size: Some(size),
        src_ip: None,
    };
    // In bytes. Those that got lost are no longer on their way after a while.
    let (mut sent, mut arrived, mut lost) = (0, 0, 0);
    let mut last = Instant::now();
    while sent < count * size as u64 {
        let mut told = [0; 8];
        if at_once(socket.recv(&mut told))? == told.len() {
            arrived = u64::from_be_bytes(told);
            last = Instant::now();
        } else if last.elapsed() > PATIENCE {
            lost = sent - arrived;
            last = Instant::now();
        }
        if sent <= arrived + lost + WINDOW {
            let done = state.try_send(socket.into(), &transmit).map(|()| contents.len());
            sent += at_once(done)? as u64;
        }
    }
    Ok(())
}

/// Mebibytes per second that arrive, until the peer says on `stream` that it has sent all.
fn count_segments(
    socket: &UdpSocket,
    state: &UdpSocketState,
    stream: &mut TcpStream,
) -> std::io::Result<f64> {
    stream.set_nonblocking(true)?;
    let mut buffers = vec![[0; 1 << 16]; quinn_udp::BATCH_SIZE];
    let (mut bytes, mut first, mut last, mut is_over) = (0, None, Instant::now(), false);
    loop {
        let mut slices: Vec<_> = buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer)).collect();
        let mut arrived = [RecvMeta::default(); quinn_udp::BATCH_SIZE];
        let messages = at_once(state.recv(socket.into(), &mut slices, &mut arrived))?;
        if messages > 0 {
            last = Instant::now();
            first.get_or_insert(last);
            bytes += arrived[..messages]
                .iter()
                .map(|message| message.len as u64)
                .sum::<u64>();
            at_once(socket.send(&bytes.to_be_bytes()))?;
        } else if is_over {
            break;
        } else {
            is_over = at_once(stream.read(&mut [0]))? > 0;
        }
    }
    stream.set_nonblocking(false)?;
    let elapsed = first.map_or(Duration::ZERO, |first| last - first);
    Ok(bytes as f64 / f64::from(1 << 20) / elapsed.as_secs_f64())
}

fn connect(host: &str, port: u16) -> std::io::Result<()> {
    let mut held = Vec::with_capacity(CONNECTS);
    if host.is_empty() {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
        while held.len() < CONNECTS {
            let (mut stream, _) = listener.accept()?;
            stream.read_exact(&mut [0])?;
            stream.write_all(&[1])?;
            held.push(stream);
        }
        // The last initiator reports when all connections are measured.
        return held.last_mut().map_or(Ok(()), |last| last.read_exact(&mut [0]));
    }
    let mut times = Vec::with_capacity(CONNECTS);
    let start = Instant::now();
    while held.len() < CONNECTS {
        let begun = Instant::now();
        let mut stream = TcpStream::connect((host, port))?;
        // As with MPA, a connection is established when the peer has answered a request.
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        held.push(stream);
        times.push(begun.elapsed());
    }
    let per_second = CONNECTS as f64 / start.elapsed().as_secs_f64();
    times.sort_unstable();
    print_figures(&format!(
        "{per_second} {}\n",
        times[CONNECTS / 2].as_secs_f64() * 1e6
    ))?;
    held.last_mut().map_or(Ok(()), |last| last.write_all(&[1]))
}
