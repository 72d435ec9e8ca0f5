//! A small service: it reverses the order of bytes. Short data goes within the messages. Long data
//! goes by RDMA: the server fetches it from the client's memory and places the result there.
//!
//! ```sh
//! reverse serve 127.0.0.1:4711
//! reverse call 127.0.0.1:4711 BYTES TIMES|forever
//! ```
//!
//! The RPC messages, in XDR: `opaque reverse(opaque) = 1`, in version 1 of a program whose number
//! is for private use (RFC 5531 §13).

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;
use urnic_rpc_rdma::binding::Binding;
use urnic_rpc_rdma::rpc::{self, CallHeader};
use urnic_rpc_rdma_verbs::{Call, Client, Options, Pool, Request, Response, Server, Service};

const PROGRAM: (u32, u32) = (0x2000_0001, 1);
const REVERSE: u32 = 1;

/// The bytes after their count may go apart from the messages.
struct Reversal;

impl Binding for Reversal {
    fn program(&self) -> (u32, u32) {
        PROGRAM
    }

    fn argument(&self, procedure: u32, arguments: &[u8]) -> Option<usize> {
        (procedure == REVERSE && arguments.len() >= 4).then_some(4)
    }

    fn result(&self, procedure: u32, arguments: &[u8]) -> Option<u32> {
        let count = arguments.first_chunk().filter(|_| procedure == REVERSE)?;
        Some(u32::from_be_bytes(*count))
    }

    fn max_results(&self, _procedure: u32, _arguments: &[u8]) -> Option<usize> {
        Some(4)
    }
}

struct Reverser(Pool);

impl Service for Reverser {
    fn call(&self, request: Request<'_>) -> Option<Response> {
        let header = CallHeader::parse(request.message).ok()?;
        let arguments = &request.message[header.len..];
        let count = u32::from_be_bytes(*arguments.first_chunk()?);
        // The bytes arrived apart from the message, or are in it.
        let bytes = match &request.item {
            Some(item) => &item[..],
            None => arguments.get(4..)?.get(..count as usize)?,
        };
        let mut reversed = self.0.take(bytes.len())?;
        reversed.copy_from_slice(bytes);
        reversed.reverse();

        let mut message = rpc::success(header.xid);
        message.extend(count.to_be_bytes());
        let item = Some((message.len(), vec![reversed.share()]));
        Some(Response { message, item })
    }
}

fn reverse(client: &Client, bytes: &[u8]) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let memory = |len| client.pool().take(len).ok_or("no memory");
    let mut argument = memory(bytes.len())?;
    argument.copy_from_slice(bytes);
    let mut message = rpc::call(client.xid(), PROGRAM.0, PROGRAM.1, REVERSE);
    message.extend((bytes.len() as u32).to_be_bytes());
    let answer = client.call(Call {
        argument: Some((message.len(), argument.share())),
        message,
        result: Some(memory(bytes.len())?),
        max_reply: rpc::MAX_REPLY_HEADER + 4,
    })?;
    Ok(match answer.result {
        Some((result, true)) => result.to_vec(),
        _ => answer
            .message
            .get(rpc::SUCCESS_LEN + 4..)
            .ok_or("a short answer")?[..bytes.len()]
            .to_vec(),
    })
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("reverse: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut options = Options {
        bindings: &[&Reversal],
        ..Options::default()
    };
    if let Ok(seconds) = std::env::var("REVERSE_PATIENCE") {
        options.connect_timeout = Duration::from_secs(seconds.parse()?);
    }
    options.windows = std::env::var_os("REVERSE_WITHOUT_WINDOWS").is_none();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address] => {
            let pool = match std::env::var("REVERSE_MEMORY") {
                Ok(bytes) => Pool::limited(bytes.parse()?),
                Err(_) => Pool::new(),
            };
            let server = Server::with_pool(address.parse()?, &options, &pool)?;
            println!("serving at {}", server.address());
            server.serve(&Reverser(server.pool().clone()))?;
        }
        ["call", address, bytes, times] => {
            let client = Client::connect(address.parse::<SocketAddr>()?, &options)?;
            let bytes: Vec<u8> = (0..bytes.parse::<u32>()?).map(|n| (n % 251) as u8).collect();
            let expected: Vec<u8> = bytes.iter().rev().copied().collect();
            let times = if times == "forever" {
                u32::MAX
            } else {
                times.parse()?
            };
            for n in 1..=times {
                if reverse(&client, &bytes)? != expected {
                    return Err("these are not the bytes reversed".into());
                }
                if n == times || n % 100 == 0 {
                    println!("{} bytes reversed {n} times", bytes.len());
                }
            }
        }
        _ => return Err("usage: reverse serve ADDRESS | reverse call ADDRESS BYTES TIMES|forever".into()),
    }
    Ok(())
}
