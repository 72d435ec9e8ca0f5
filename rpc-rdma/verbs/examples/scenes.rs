//! What clients and servers are to one another beside calls and answers: each scene has both in
//! this process, and says what it saw. But the last: there is a server alone.
//!
//! ```sh
//! scenes waits | attends | unavailable | deaf | crowd | serves
//! ```

use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use urnic_rpc_rdma::binding::Binding;
use urnic_rpc_rdma::rpc::{self, CallHeader};
use urnic_rpc_rdma_verbs::{Call, Caller, Client, Options, Request, Response, Server, Service};

/// For private use (RFC 5531 §13).
const PROGRAM: (u32, u32) = (0x2000_0003, 1);
/// Answers with the port of who calls.
const WHO: u32 = 1;
/// Is answered when MEET was called.
const WAIT: u32 = 2;
const MEET: u32 = 3;
/// The server calls back before it answers, or the procedure that is named after it has.
const BACK: u32 = 4;
const LATER: u32 = 5;
/// What a client takes.
const TELL: u32 = 6;
/// How long a server waits for one that may not answer, and for one that will.
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

/// Procedure and argument.
fn call(xid: u32, procedure: u32, argument: u32) -> Vec<u8> {
    let mut message = rpc::call(xid, PROGRAM.0, PROGRAM.1, procedure);
    message.extend(argument.to_be_bytes());
    message
}

/// The last word of a message: an argument, a result, or what was wrong with the call.
fn last(message: &[u8]) -> u32 {
    message.last_chunk().map_or(0, |word| u32::from_be_bytes(*word))
}

fn answer(xid: u32, result: u32) -> Option<Response> {
    let message = [&rpc::success(xid)[..], &result.to_be_bytes()].concat();
    Some(Response { message, item: None })
}

/// The server.
struct Host {
    met: Sender<()>,
    meeting: Mutex<Receiver<()>>,
    patience: Duration,
}

impl Host {
    fn new(patience: Duration) -> Host {
        let (met, meeting) = channel();
        let meeting = Mutex::new(meeting);
        Host {
            met,
            meeting,
            patience,
        }
    }

    /// What the client answered, or why there is no answer.
    fn back(client: &Caller, procedure: u32, patience: Duration) -> u32 {
        match client.call(call(client.xid(), procedure, 0), patience) {
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
                let meeting = self.meeting.lock().unwrap_or_else(PoisonError::into_inner);
                meeting.recv_timeout(LONG).map_or(0, |()| 1)
            }
            MEET => self.met.send(()).map_or(0, |()| 1),
            BACK => Self::back(request.back?, argument, self.patience),
            LATER => {
                let (client, patience) = (request.back?.clone(), self.patience);
                std::thread::spawn(move || Self::back(&client, argument, patience));
                0
            }
            _ => 0,
        };
        answer(header.xid, result)
    }
}

/// What a client that takes calls answers.
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

/// Has clients do something while there is a server.
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

/// Calls of one connection wait for each other, however they come: alone, behind many others, or
/// with the one that they wait for.
fn waits() -> Done {
    const ROUNDS: u32 = 100;
    with_server(Host::new(LONG), &options(), |server| {
        let client = Client::connect(server.address(), &options())?;
        // Before the first answer there may be one call at a time (RFC 8166 §3.3.3).
        ask(&client, WHO, 0)?;
        for round in 0..ROUNDS {
            let mut open = Vec::new();
            for _ in 0..round {
                open.push(submit(&client, WHO, 0)?);
            }
            let waiting = submit(&client, WAIT, 0)?;
            if round % 2 == 0 {
                // The server has begun with those that came before.
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

/// A client that makes no call is called.
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

/// A server calls what its binding does not let go backward.
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

/// A client takes no calls, and goes on all the same.
fn deaf() -> Done {
    with_server(Host::new(SHORT), &options(), |server| {
        let client = Client::connect(server.address(), &options())?;
        let port = ask(&client, WHO, 0)?;
        for _ in 0..2 {
            if ask(&client, BACK, TELL)? != u32::MAX {
                return Err("somebody answered".into());
            }
        }
        println!("the same connection: {}", ask(&client, WHO, 0)? == port);
        Ok(())
    })
}

/// More clients than a server has connections for: the one that was silent for longest connects
/// again when it calls.
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
        // The second is silent for longest.
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

/// A server that does one thing at a time.
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
