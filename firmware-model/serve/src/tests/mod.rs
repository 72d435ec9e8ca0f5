//! The server against scripted clients.

mod client;
mod functions;
mod sessions;

use std::time::Duration;
use urnic_testkit::Wait;

/// Maximum wait for an event that must happen.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Waits until `probe` returns a value.
fn wait_for<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let mut wait = Wait::new(TIMEOUT);
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(!wait.is_over(), "no {what} in {TIMEOUT:?}");
        std::thread::yield_now();
    }
}
