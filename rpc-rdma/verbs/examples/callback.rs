//! A service that calls back: a client requests a notification of each step, and the server, which
//! counts down, calls the client for each step. At the start, the server calls NULL, which every
//! program permits backward, to check that the client answers.
//!
//! ```sh
//! callback serve 127.0.0.1:4712
//! callback call 127.0.0.1:4712 STEPS
//! ```
//!
//! The RPC messages, in XDR: `unsigned count_down(unsigned) = 1`, forward, and `void step(unsigned)
//! = 2`, backward, in version 1 of a program whose number is for private use (RFC 5531 §13).

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use urnic_rpc_rdma::binding::Binding;
use urnic_rpc_rdma::rpc::{self, CallHeader};
use urnic_rpc_rdma_verbs::{Backchannel, Call, Client, Options, Request, Response, Server, Service};

const PROGRAM: (u32, u32) = (0x2000_0002, 1);
const NULL: u32 = 0;
const COUNT_DOWN: u32 = 1;
const STEP: u32 = 2;
const TIMEOUT: Duration = Duration::from_secs(600);

/// All data stays in the messages, and STEP goes backward.
struct Steps;

impl Binding for Steps {
    fn program(&self) -> (u32, u32) {
        PROGRAM
    }

    fn max_results(&self, _procedure: u32, _arguments: &[u8]) -> Option<usize> {
        Some(4)
    }

    fn backward(&self, procedure: u32) -> bool {
        matches!(procedure, NULL | STEP)
    }
}

/// The numeric argument of a call.
fn argument(message: &[u8]) -> Option<(CallHeader, u32)> {
    let header = CallHeader::parse(message).ok()?;
    let number = message[header.len..]
        .first_chunk()
        .map_or(0, |word| u32::from_be_bytes(*word));
    Some((header, number))
}

fn answered(xid: u32, results: &[u8]) -> Option<Response> {
    let message = [&rpc::success(xid), results].concat();
    Some(Response { message, item: None })
}

/// The service of the server.
struct CountDown;

/// Calls the client back.
fn call_back(client: &Backchannel, procedure: u32, number: u32) -> Result<(), urnic_rpc_rdma_verbs::Error> {
    let mut message = rpc::call(client.xid(), PROGRAM.0, PROGRAM.1, procedure);
    message.extend(number.to_be_bytes());
    client.call(message, TIMEOUT).map(drop)
}

impl Service for CountDown {
    fn call(&self, request: Request<'_>) -> Option<Response> {
        let (header, count) = argument(request.message)?;
        let client = request.back?;
        let called_back = call_back(client, NULL, 0).and_then(|()| {
            (0..count)
                .rev()
                .try_for_each(|step| call_back(client, STEP, step))
        });
        match called_back {
            Ok(()) => answered(header.xid, &count.to_be_bytes()),
            Err(error) => {
                println!("{}: {error}", client.peer());
                None
            }
        }
    }
}

/// The service of the client.
struct StepPrinter;

impl Service for StepPrinter {
    fn call(&self, request: Request<'_>) -> Option<Response> {
        let (header, step) = argument(request.message)?;
        match header.procedure {
            NULL => println!("called back"),
            _ => println!("step {step}"),
        }
        answered(header.xid, &[])
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("callback: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut options = Options {
        bindings: &[&Steps],
        ..Options::default()
    };
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address] => {
            // The only thread of the server waits for the client and also receives the client's
            // answer.
            options.threads = 1;
            let server = Server::bind(address.parse()?, &options)?;
            println!("serving at {}", server.address());
            server.serve(&CountDown)?;
        }
        ["call", address, steps] => {
            options.callbacks = Some(Arc::new(StepPrinter));
            let client = Client::connect(address.parse()?, &options)?;
            let mut message = rpc::call(client.xid(), PROGRAM.0, PROGRAM.1, COUNT_DOWN);
            message.extend(steps.parse::<u32>()?.to_be_bytes());
            let answer = client.call(Call {
                message,
                argument: None,
                result: None,
                max_reply: rpc::MAX_REPLY_HEADER + 4,
            })?;
            println!("counted down {} bytes", answer.message.len());
        }
        _ => return Err("usage: callback serve ADDRESS | callback call ADDRESS STEPS".into()),
    }
    Ok(())
}
