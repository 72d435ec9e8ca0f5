//! A raw TCP peer: sends start-up frames and FPDUs given as bytes, and reads the answers.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::framing::Framing;
use crate::wait::TIME_LIMIT;

/// The bytes of a line of hexadecimal digits; spaces are ignored, as in the figures of the RFCs.
#[track_caller]
pub fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text
        .chars()
        .filter(|c| !c.is_whitespace())
        .map(|c| c.to_digit(16).expect("a digit"))
        .collect();
    assert!(digits.len().is_multiple_of(2), "half a byte in {text}");
    digits
        .chunks(2)
        .map(|pair| (pair[0] << 4 | pair[1]) as u8)
        .collect()
}

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// FIN: everything sent before it arrived.
    Closed,
    /// RST.
    Reset,
}

/// One connection.
#[derive(Debug)]
pub struct Peer {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
    /// The framing of what the peer sends.
    pub outbound: Framing,
    /// The framing of what the peer receives.
    pub inbound: Framing,
}

impl Peer {
    /// Connects to this address.
    #[track_caller]
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect_timeout(&address, TIME_LIMIT);
        Self::over(stream.unwrap_or_else(|error| panic!("{address}: {error}")))
    }

    /// Connects from another address of this machine.
    #[track_caller]
    pub fn connect_from(source: Ipv4Addr, address: SocketAddr) -> Self {
        use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        bind(&socket, &SocketAddr::new(source.into(), 0)).expect("an address of this machine");
        connect(&socket, &address).unwrap_or_else(|error| panic!("{source} to {address}: {error}"));
        Self::over(socket.into())
    }

    /// Whether a byte arrives before the end of the connection.
    pub fn has_data(&mut self) -> bool {
        self.reader.fill_buf().is_ok_and(|bytes| !bytes.is_empty())
    }

    /// Accepts a connection.
    #[track_caller]
    pub fn accept(listener: &TcpListener) -> Self {
        Self::over(listener.accept().expect("a call").0)
    }

    fn over(stream: TcpStream) -> Self {
        stream.set_nodelay(true).expect("a TCP socket");
        stream.set_read_timeout(Some(TIME_LIMIT)).expect("a TCP socket");
        Self {
            reader: BufReader::new(stream.try_clone().expect("a descriptor")),
            stream,
            outbound: Framing::default(),
            inbound: Framing::default(),
        }
    }

    /// Sends these bytes. An error is ignored: a read reports that the other side has closed.
    pub fn send(&mut self, bytes: &[u8]) {
        match self.stream.write_all(bytes) {
            Err(error) if !matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                panic!("sending: {error}")
            }
            _ => {}
        }
    }

    /// Sends these bytes in pieces, each in a segment of its own as far as TCP allows.
    pub fn send_in_pieces(&mut self, bytes: &[u8], size: usize) {
        bytes.chunks(size).for_each(|piece| self.send(piece));
    }

    /// Sends an FPDU of each ULPDU, all of them in one piece.
    pub fn send_ulpdus<T: AsRef<[u8]>>(&mut self, ulpdus: &[T]) {
        let bytes = self.framed(ulpdus);
        self.send(&bytes);
    }

    /// The FPDUs of these ULPDUs, which must be sent next.
    pub fn framed<T: AsRef<[u8]>>(&mut self, ulpdus: &[T]) -> Vec<u8> {
        let framing = &mut self.outbound;
        ulpdus
            .iter()
            .flat_map(|ulpdu| framing.frame(ulpdu.as_ref()))
            .collect()
    }

    /// Ends our side of the stream in good order.
    pub fn finish(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Ends the connection by a reset.
    pub fn reset(self) {
        // A socket that closes with a linger time of zero sends RST.
        let linger = rustix::net::sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO));
        linger.expect("a TCP socket");
    }

    /// Reads exactly `len` bytes; panics if the connection ends before.
    #[track_caller]
    pub fn read_bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.reader
            .read_exact(&mut bytes)
            .unwrap_or_else(|error| panic!("wanted {len} bytes: {error}"));
        bytes
    }

    /// Reads the next FPDU and returns its ULPDU; panics if it is not well formed, or if the
    /// connection ends before.
    #[track_caller]
    pub fn ulpdu(&mut self) -> Vec<u8> {
        let ulpdu = self.inbound.read(&mut self.reader);
        ulpdu.unwrap_or_else(|error| panic!("wanted an FPDU: {error}"))
    }

    /// Reads the next FPDU and returns its ULPDU; `None` if the connection ends before.
    #[track_caller]
    pub fn next_ulpdu(&mut self) -> Option<Vec<u8>> {
        match self.inbound.read(&mut self.reader) {
            Ok(ulpdu) => Some(ulpdu),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset
                ) =>
            {
                None
            }
            Err(error) => panic!("wanted an FPDU or the end: {error}"),
        }
    }

    /// Reads until the connection ends; panics if a byte arrives before the end.
    #[track_caller]
    pub fn end(&mut self) -> End {
        let (bytes, end) = self.read_to_end();
        assert!(bytes.is_empty(), "more came before the end: {bytes:02x?}");
        end
    }

    /// All bytes until the connection ends, and how it ends.
    #[track_caller]
    pub fn read_to_end(&mut self) -> (Vec<u8>, End) {
        let mut bytes = Vec::new();
        match self.reader.read_to_end(&mut bytes) {
            Ok(_) => (bytes, End::Closed),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => (bytes, End::Reset),
            Err(error) => panic!("the connection did not end: {error}; until then {bytes:02x?}"),
        }
    }

    /// Checks that no byte arrives, and that the connection stays, for this long. There is no
    /// condition to wait for when something must *not* happen.
    #[track_caller]
    pub fn stays_silent(&mut self, span: Duration) {
        self.stream.set_read_timeout(Some(span)).expect("a TCP socket");
        let outcome = loop {
            match self.reader.fill_buf().map(<[u8]>::to_vec) {
                // When a stopped machine continues, a system call with a time limit ends with EINTR
                // (signal(7)).
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                outcome => break outcome,
            }
        };
        self.stream
            .set_read_timeout(Some(TIME_LIMIT))
            .expect("a TCP socket");
        match outcome {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            other => panic!("not silent: {other:02x?}"),
        }
    }
}
