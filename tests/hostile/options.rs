//! What this process is to do, and for how long.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use urnic_tests::random::Random;

/// The arguments.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) attack: String,
    pub(crate) random: Random,
    pub(crate) end: Instant,
    /// The port of the victim, or of the hostile listener.
    pub(crate) port: u16,
    /// The verbs program, and the plug-in that it runs under.
    pub(crate) program: String,
    pub(crate) plugin: String,
}

/// Whether standard input has ended.
static ENDED: AtomicBool = AtomicBool::new(false);

/// For so long after the end of standard input, this process may go on.
const RESPITE: Duration = Duration::from_secs(10);

/// Notes the end of standard input, by which a test ends this process. A hostile process may wait
/// for another one, or for what it made itself; it ends all the same.
pub(crate) fn watch_input() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        ENDED.store(true, Ordering::Relaxed);
        std::thread::sleep(RESPITE);
        println!("ended while it waited");
        std::process::exit(0);
    });
}

/// Whether this moment has come, or standard input has ended.
pub(crate) fn is_over(end: Instant) -> bool {
    ENDED.load(Ordering::Relaxed) || Instant::now() >= end
}

impl Options {
    pub(crate) fn is_over(&self) -> bool {
        is_over(self.end)
    }

    pub(crate) fn from_arguments() -> Option<Options> {
        let mut words = std::env::args().skip(1);
        let mut options = Options {
            attack: words.next()?,
            random: Random(1),
            end: Instant::now(),
            port: 0,
            program: String::new(),
            plugin: String::new(),
        };
        while let Some(word) = words.next() {
            let value = words.next()?;
            match word.as_str() {
                // Seeds that differ in a bit give unrelated numbers.
                "--seed" => {
                    options.random =
                        Random(value.parse::<u64>().ok()?.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
                }
                "--seconds" => options.end += Duration::from_secs(value.parse().ok()?),
                "--port" => options.port = value.parse().ok()?,
                "--program" => options.program = value,
                "--plugin" => options.plugin = value,
                _ => return None,
            }
        }
        Some(options)
    }
}
