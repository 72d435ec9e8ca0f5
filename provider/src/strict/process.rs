//! The checks of the process: their start, and the findings at its end.

use std::path::Path;

use urnic_config::{Config, Strict as Mode};
use urnic_sync::Published;

use super::findings::{Findings, Rule, Suppressions};
use super::objects::Objects;
use super::regions::Regions;
use super::watched_pages::{self, Look};

/// The exit status of a program with findings, for `strict=error`.
const STATUS: i32 = 86;

/// The checks of one process.
pub(crate) struct Strict {
    mode: Mode,
    pub(crate) findings: Findings,
    pub(crate) objects: Objects,
    pub(crate) regions: Regions,
}

static CURRENT: Published<Strict> = Published::new();

/// The checks of this process, if the option is on.
#[inline]
pub(crate) fn current() -> Option<&'static Strict> {
    CURRENT.get()
}

/// Starts the checks if the option is on.
pub(crate) fn start(config: &Config) {
    if config.strict == Mode::Off {
        return;
    }
    install(config.strict, suppressions(config.suppressions.as_deref()));
}

fn install(mode: Mode, suppressions: Suppressions) {
    CURRENT.set(Strict {
        mode,
        findings: Findings::new(suppressions),
        objects: Objects::default(),
        regions: Regions::default(),
    });
}

/// A forked child starts anew: it has none of the parent's objects, and threads of the parent may
/// have held locks. The memory of the parent's checks is not freed, because that would need these
/// locks.
pub(crate) fn after_fork_in_child() {
    if let Some(parents) = current() {
        install(parents.mode, parents.findings.suppressions());
    }
}

impl Strict {
    /// Reports where the program used memory of requests before their completion.
    pub(super) fn report_looks(&self) {
        for Look { site, addr, request } in watched_pages::looks() {
            let (rule, what) = match request.is_sent() {
                true => (Rule::BufferChanged, "written"),
                false => (Rule::ReceiveTouched, "read or written"),
            };
            let (name, wr_id) = (request.opcode.verbs_name(), request.wr_id);
            self.findings.report(rule, &site, || {
                format!(
                    "the memory of the {name} with wr_id {wr_id:#x} was {what} at {addr:#x}, before the poll of \
                     its completion"
                )
            });
        }
    }

    /// Finds objects that are left, and logs a summary. Returns the exit status to end with, if it
    /// is not the program's own.
    pub(crate) fn end(&self) -> Option<i32> {
        self.report_looks();
        let left = self.objects.left();
        for left in left.iter().filter(|left| !left.is_of_librdmacm()) {
            self.findings.report(Rule::Leak, &left.site, || left.to_string());
        }
        let findings = self.findings.all();
        let (places, times) = (
            findings.len(),
            findings.iter().map(|finding| finding.count).sum::<u64>(),
        );
        match (places, times) {
            (0, _) => return None,
            (1, 1) => tracing::warn!("strict: 1 finding"),
            (1, _) => tracing::warn!("strict: 1 finding, {times} times"),
            _ => tracing::warn!("strict: {places} findings, {times} times in all"),
        }
        (self.mode == Mode::Error).then_some(STATUS)
    }
}

/// The suppressions of a file, or none; a file that cannot be read is an error in the log.
fn suppressions(path: Option<&Path>) -> Suppressions {
    let Some(path) = path else {
        return Suppressions::default();
    };
    Suppressions::read(path).unwrap_or_else(|error| {
        tracing::error!("suppressions {}: {error}", path.display());
        Suppressions::default()
    })
}
