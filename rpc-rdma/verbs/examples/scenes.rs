//! Interactions of clients and servers other than calls and answers. Each scene runs both in this
//! process and prints its observations. The last scene runs a server only.
//!
//! ```sh
//! scenes waits | attends | unavailable | deaf | crowd | serves
//! ```

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use urnic_rpc_rdma::binding::Binding;
use urnic_rpc_rdma::rpc::{self, CallHeader};
use urnic_rpc_rdma_verbs::{Backchannel, Call, Client, Options, Request, Response, Server, Service};
use urnic_sync::Mutex;

/// A program number for private use (RFC 5531 §13).
const PROGRAM: (u32, u32) = (0x2000_0003, 1);
/// The answer has the port of the client.
const WHO: u32 = 1;
/// WAIT has no answer before MEET was called.
const WAIT: u32 = 2;
const MEET: u32 = 3;
/// The server calls back before it answers (BACK), or after it answered (LATER).
const BACK: u32 = 4;
const LATER: u32 = 5;
/// A procedure that a client with callbacks accepts.
const TELL: u32 = 6;
/// Time for which a server waits for a client that may not answer (SHORT), or that will answer
/// (LONG).
const SHORT: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_secs(60);

type Done = Result<(), Box<dyn Error>>;

struct Scenes;

impl Binding for Scenes {
    fn program(&self) -> (u32, u32) {
        PROGRAM
    }

    fn max_results(&self, _procedure: u32, _arguments: &[u8]) -> Option<usize> {
        Some(4)
    }

    fn backward(&self, procedure: u32) -> bool {
        procedure == TELL
    }
}

/// A call with an argument of one word.
fn call(xid: u32, procedure: u32, argument: u32) -> Vec<u8> {
    let mut message = rpc::call(xid, PROGRAM.0, PROGRAM.1, procedure);
    message.extend(argument.to_be_bytes());
    message
}

/// The last word of a message: an argument, a result, or the reason of a failed call.
fn last(message: &[u8]) -> u32 {
    message.last_chunk().map_or(0, |word| u32::from_be_bytes(*word))
}

fn answer(xid: u32, result: u32) -> Option<Response> {
    let message = [&rpc::success(xid)[..], &result.to_be_bytes()].concat();
    Some(Response { message, item: None })
}

/// The service of the server.
struct Host {
    met: Sender<()>,
    meeting: Mutex<Receiver<()>>,
    timeout: Duration,
}

impl Host {
    fn new(timeout: Duration) -> Host {
        let (met, meeting) = channel();
        let meeting = Mutex::new(meeting);
        Host {
            met,
            meeting,
            timeout,
        }
    }

    /// The answer of the client, or a word for the missing answer.
    fn back(client: &Backchannel, procedure: u32, timeout: Duration) -> u32 {
        match client.call(call(client.xid(), procedure, 0), timeout) {
            Ok(answer) => last(&answer),
            Err(error) => {
                println!("{error}");
                u32::MAX
            }
        }
    }
}

impl Service for Host {
    fn call(&self, request: Request<'_>) -> Option<Response> {
        let header = CallHeader::parse(request.message).ok()?;
        let argument = last(request.message);
        let result = match header.procedure {
            WHO => request.peer.port().into(),
            WAIT => {
                let meeting = self.meeting.lock();
                meeting.recv_timeout(LONG).map_or(0, |()| 1)
            }
            MEET => self.met.send(()).map_or(0, |()| 1),
            BACK => Self::back(request.back?, argument, self.timeout),
            LATER => {
                let (client, timeout) = (request.back?.clone(), self.timeout);
                std::thread::spawn(move || Self::back(&client, argument, timeout));
                0
            }
            _ => 0,
        };
        answer(header.xid, result)
    }
}

/// The service of a client with callbacks.
struct Guest(Arc<AtomicBool>);

impl Service for Guest {
    fn call(&self, request: Request<'_>) -> Option<Response> {
        let header = CallHeader::parse(request.message).ok()?;
        self.0.store(true, Ordering::SeqCst);
        answer(header.xid, 7)
    }
}

fn options() -> Options {
    Options {
        bindings: &[&Scenes],
        threads: 2,
        ..Options::default()
    }
}

/// Runs a scene while a server runs.
fn with_server(host: Host, options: &Options, scene: impl FnOnce(&Server) -> Done) -> Done {
    let server = Server::bind(([127, 0, 0, 1], 0).into(), options)?;
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| server.serve(&host));
        let done = scene(&server);
        server.stop();
        serving.join().map_err(|_| "the server panicked")??;
        done
    })
}

fn submit(client: &Client, procedure: u32, argument: u32) -> Result<u32, Box<dyn Error>> {
    Ok(client.submit(Call {
        message: call(client.xid(), procedure, argument),
        argument: None,
        result: None,
        max_reply: rpc::MAX_REPLY_HEADER + 4,
    })?)
}

fn ask(client: &Client, procedure: u32, argument: u32) -> Result<u32, Box<dyn Error>> {
    let xid = submit(client, procedure, argument)?;
    Ok(last(&client.wait(xid)?.message))
}

/// Several calls of one connection wait for each other, if they arrive alone, after many others,
/// or together with the call that they wait for.
fn waits() -> Done {
    const ROUNDS: u32 = 100;
    with_server(Host::new(LONG), &options(), |server| {
        let client = Client::connect(server.address(), &options())?;
        // Before the first answer there may be one outstanding call (RFC 8166 §3.3.3).
        ask(&client, WHO, 0)?;
        for round in 0..ROUNDS {
            let mut open = Vec::new();
            for _ in 0..round {
                open.push(submit(&client, WHO, 0)?);
            }
            let waiting = submit(&client, WAIT, 0)?;
            if round % 2 == 0 {
                // The server has begun with the calls that arrived before.
                for xid in open.drain(..) {
                    client.wait(xid)?;
                }
            }
            open.push(submit(&client, MEET, 0)?);
            for xid in open {
                client.wait(xid)?;
            }
            client.wait(waiting)?;
        }
        println!("met {ROUNDS} times");
        Ok(())
    })
}

/// A server calls a client that makes no call at the time.
fn attends() -> Done {
    let called = Arc::new(AtomicBool::new(false));
    let listening = Options {
        callbacks: Some(Arc::new(Guest(Arc::clone(&called)))),
        ..options()
    };
    with_server(Host::new(LONG), &options(), |server| {
        let client = Client::connect(server.address(), &listening)?;
        ask(&client, LATER, TELL)?;
        while !called.load(Ordering::SeqCst) {
            client.attend(Duration::from_millis(10));
        }
        println!("called");
        Ok(())
    })
}

/// A server makes calls that its binding does not permit backward.
fn unavailable() -> Done {
    let listening = Options {
        callbacks: Some(Arc::new(Guest(Arc::default()))),
        ..options()
    };
    with_server(Host::new(LONG), &options(), |server| {
        let client = Client::connect(server.address(), &listening)?;
        for procedure in [TELL, WHO, TELL] {
            println!("{}", ask(&client, BACK, procedure)?);
        }
        Ok(())
    })
}

/// A client that accepts no calls continues after a call of the server.
fn deaf() -> Done {
    with_server(Host::new(SHORT), &options(), |server| {
        let client = Client::connect(server.address(), &options())?;
        let port = ask(&client, WHO, 0)?;
        for _ in 0..2 {
            if ask(&client, BACK, TELL)? != u32::MAX {
                return Err("the client answered a call of the server".into());
            }
        }
        println!("the same connection: {}", ask(&client, WHO, 0)? == port);
        Ok(())
    })
}

/// More clients than the server has connections for. The client without a message for the longest
/// time loses its connection, and connects again at its next call.
fn crowd() -> Done {
    let few = Options {
        connections: 3,
        ..options()
    };
    with_server(Host::new(LONG), &few, |server| {
        let client = || Client::connect(server.address(), &options());
        let who = |client: &Client| ask(client, WHO, 0);
        let three = [client()?, client()?, client()?];
        let mut before = Vec::new();
        for client in &three {
            before.push(who(client)?);
        }
        // The second client has sent no message for the longest time.
        who(&three[2])?;
        who(&three[0])?;
        let fourth = client()?;
        who(&fourth)?;
        for nth in [0, 2, 1] {
            let same = who(&three[nth])? == before[nth];
            println!("client {nth}: {}", if same { "stayed" } else { "came back" });
        }
        Ok(())
    })
}

/// A server with one thread.
fn serves() -> Done {
    let one = Options {
        threads: 1,
        ..options()
    };
    let server = Server::bind(([127, 0, 0, 1], 0).into(), &one)?;
    println!("serving at {}", server.address());
    Ok(server.serve(&Host::new(LONG))?)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["waits"] => waits(),
        ["attends"] => attends(),
        ["unavailable"] => unavailable(),
        ["deaf"] => deaf(),
        ["crowd"] => crowd(),
        ["serves"] => serves(),
        _ => Err("usage: scenes waits | attends | unavailable | deaf | crowd | serves".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("scenes: {error}");
            ExitCode::FAILURE
        }
    }
}
