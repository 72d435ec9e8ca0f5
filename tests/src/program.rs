//! One real program: its start, its output, its end.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{ErrorKind, PipeReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;
use urnic_sync::{Condvar, Mutex, MutexGuard};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::ioctl_fionread;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::build;
use crate::wait::{TIME_LIMIT, Wait, until};

/// Whether a variable of the environment changes what a program under test does: whoever runs the
/// tests may have set it for other programs.
fn is_of_the_user(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    let prefixes = ["URNIC_", "IBV_", "RDMAV_", "LD_PRELOAD"];
    prefixes.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
}

/// What a running program needs beside it, such as a device in another process.
pub(crate) type Companion = Box<dyn fmt::Debug + Send + Sync>;

/// A program to start.
#[derive(Debug, Clone)]
pub struct Program {
    /// The command in front of the program: `nsenter …`, `setpriv …`, `chroot …`.
    place: Vec<OsString>,
    /// The path of the plug-in as the program sees it; `None` runs the program without the plug-in.
    plugin: Option<PathBuf>,
    environment: Vec<(OsString, OsString)>,
    argv: Vec<OsString>,
}

impl Program {
    /// A program with the RNIC present.
    pub fn new(name: impl AsRef<OsStr>) -> Self {
        Self {
            plugin: Some(build::plugin().to_owned()),
            ..Self::plain(name)
        }
    }

    /// A program without the RNIC.
    pub fn plain(name: impl AsRef<OsStr>) -> Self {
        let argv = vec![name.as_ref().to_owned()];
        Self {
            place: Vec::new(),
            plugin: None,
            environment: Vec::new(),
            argv,
        }
    }

    /// The program's name, for messages.
    pub fn name(&self) -> String {
        Path::new(&self.argv[0])
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.argv.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<T: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = T>) -> Self {
        self.argv
            .extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Adds the words of a line as arguments.
    #[must_use]
    pub fn line(self, line: &str) -> Self {
        self.args(line.split_whitespace())
    }

    /// Sets an environment variable of the program.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.into(), value.as_ref().to_owned()));
        self
    }

    /// Sets a variable that was not set before.
    #[must_use]
    pub fn env_unless_set(self, name: &str, value: &str) -> Self {
        if self.environment.iter().any(|(set, _)| set == name) {
            return self;
        }
        self.env(name, value)
    }

    /// Whether this is one of the program's arguments.
    pub fn has_arg(&self, arg: &str) -> bool {
        self.argv.iter().skip(1).any(|known| known == arg)
    }

    /// Puts a command in front of the program, which changes the place where it runs. The last
    /// command comes first.
    #[must_use]
    pub fn through<T: AsRef<OsStr>>(mut self, words: impl IntoIterator<Item = T>) -> Self {
        self.place
            .splice(0..0, words.into_iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// Sets the path of the plug-in's file in the place where the program runs. Without effect on
    /// plain programs.
    #[must_use]
    pub fn plugin_at(mut self, path: impl AsRef<Path>) -> Self {
        self.plugin = self.plugin.map(|_| path.as_ref().to_owned());
        self
    }

    fn command(&self) -> Command {
        let mut words: Vec<OsString> = self.place.clone();
        let mut variables = self.environment.clone();
        if let Some(plugin) = &self.plugin {
            variables.push(("LD_PRELOAD".into(), plugin.into()));
        }
        if !variables.is_empty() {
            words.push("env".into());
            words.extend(variables.into_iter().map(|(mut name, value)| {
                name.push("=");
                name.push(value);
                name
            }));
        }
        words.extend(self.argv.iter().cloned());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        for (name, _) in std::env::vars_os().filter(|(name, _)| is_of_the_user(name)) {
            command.env_remove(name);
        }
        command.env("LC_ALL", "C.UTF-8");
        command.env("XDG_RUNTIME_DIR", build::runtime_folder());
        command
    }

    /// Whether the program has the plug-in under test, runs as the user of the tests, and in the
    /// file system of the tests. A test that requests another user or another root has its reasons.
    pub(crate) fn is_ordinary(&self) -> bool {
        let here = self.place.first().is_none_or(|word| word == "nsenter")
            && !self.place.contains(&"setpriv".into());
        here && self.plugin.as_deref() == Some(build::plugin())
    }

    /// The command in front of the program.
    pub(crate) fn place(&self) -> &[OsString] {
        &self.place
    }

    pub(crate) fn sets(&self, variable: &str) -> bool {
        self.environment.iter().any(|(name, _)| name == variable)
    }

    /// Starts the program as described here, with its output kept. `companion` is dropped after the
    /// program has ended.
    pub(crate) fn start(&self, companion: Option<Companion>) -> Running {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let mut command = self.command();
        command
            .stdin(Stdio::piped())
            .stdout(writer.try_clone().expect("a descriptor"))
            .stderr(writer)
            .process_group(0);
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {}: {error}", self.name()));
        drop(command);
        let output = Arc::new(Output {
            pipe: reader,
            bytes: Mutex::default(),
            grown: Condvar::new(),
        });
        let sink = Arc::clone(&output);
        std::thread::spawn(move || sink.collect());
        Running {
            name: self.name(),
            line: format!("{self}"),
            child,
            status: None,
            output,
            _companion: companion,
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<_> = self.argv.iter().map(|word| word.to_string_lossy()).collect();
        f.write_str(&words.join(" "))
    }
}

/// The output of a program so far.
#[derive(Debug)]
struct Output {
    pipe: PipeReader,
    bytes: Mutex<Vec<u8>>,
    grown: Condvar,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock()
    }

    /// Collects the output of the program until no process can write any more.
    fn collect(&self) {
        let mut chunk = [0; 65536];
        loop {
            // Bytes leave the pipe under the lock only: every byte is in the pipe or in `bytes`.
            let mut readable = [PollFd::new(&self.pipe, PollFlags::IN)];
            let _ = poll(&mut readable, None);
            let mut bytes = self.lock();
            match (&self.pipe).read(&mut chunk) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => break,
                Ok(n) => {
                    bytes.extend_from_slice(&chunk[..n]);
                    self.grown.notify_all();
                }
            }
        }
    }

    /// Waits until everything that is written by now has been collected. A child that outlives the
    /// program may hold the pipe, so this does not wait for the end of the pipe.
    fn catch_up(&self) {
        until(TIME_LIMIT, || {
            let _bytes = self.lock();
            (ioctl_fionread(&self.pipe) == Ok(0)).then_some(())
        });
    }
}

/// A running program. It is ended with all its children when dropped.
#[derive(Debug)]
pub struct Running {
    name: String,
    line: String,
    child: Child,
    status: Option<ExitStatus>,
    output: Arc<Output>,
    /// Dropped after the program has ended.
    _companion: Option<Companion>,
}

impl Running {
    /// The process ID of the program.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The output so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&self.output.lock()).into_owned()
    }

    /// The exit status of the program, once it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("our own child");
        }
        self.status
    }

    /// Waits for output in which `find` finds something.
    #[track_caller]
    pub fn wait_for_output<T>(&mut self, what: &str, find: impl FnMut(&str) -> Option<T>) -> T {
        self.wait_for_output_from(0, what, find)
    }

    /// Waits for output in which `find` finds something, after the first `from` bytes of the
    /// output. `find` sees whole lines, because many programs write a line in parts; when the
    /// program has ended, it sees all.
    #[track_caller]
    pub fn wait_for_output_from<T>(
        &mut self,
        from: usize,
        what: &str,
        mut find: impl FnMut(&str) -> Option<T>,
    ) -> T {
        let mut wait = Wait::new(TIME_LIMIT);
        loop {
            let over = self.ended().is_some() || wait.is_over();
            if over {
                self.output.catch_up();
            }
            let bytes = self.output.lock();
            let mut printed = bytes.get(from..).unwrap_or_default();
            if !over {
                let whole = printed.iter().rposition(|byte| *byte == b'\n');
                printed = &printed[..whole.map_or(0, |end| end + 1)];
            }
            if let Some(found) = find(&String::from_utf8_lossy(printed)) {
                return found;
            }
            if over {
                drop(bytes);
                panic!("{} did not print {what}:\n{}", self.line, self.output());
            }
            // The end of the program causes no event.
            let pause = Duration::from_millis(20);
            drop(self.output.grown.wait_timeout(bytes, pause));
        }
    }

    /// Writes to the standard input of the program.
    pub fn write_stdin(&mut self, text: &str) {
        use std::io::Write;
        let stdin = self.child.stdin.as_mut().expect("a pipe");
        stdin
            .write_all(text.as_bytes())
            .unwrap_or_else(|error| panic!("{}: {error}\n{}", self.line, self.output()));
    }

    /// Waits until it listens at `port`; panics if it ends before.
    #[track_caller]
    pub fn wait_until_listening(&mut self, port: u16) {
        self.try_wait_until_listening(port)
            .unwrap_or_else(|printed| panic!("{printed}"));
    }

    /// Waits until the program listens at `port`.
    ///
    /// # Errors
    /// The output of the program, if it ends early or does not listen in time.
    pub fn try_wait_until_listening(&mut self, port: u16) -> Result<(), String> {
        let pid = self.pid();
        let listening = until(TIME_LIMIT, || {
            let over = self.ended().is_some();
            crate::wait::listening(pid, port)
                .then_some(true)
                .or_else(|| over.then_some(false))
        });
        if listening == Some(true) {
            return Ok(());
        }
        self.output.catch_up();
        Err(format!(
            "{} does not listen at {port}:\n{}",
            self.line,
            self.output()
        ))
    }

    /// Sends a signal to the program alone.
    pub fn signal(&self, signal: Signal) {
        if self.status.is_none()
            && let Some(pid) = Pid::from_raw(self.child.id().cast_signed())
        {
            let _ = kill_process(pid, signal);
        }
    }

    /// Stops the program; none of its threads runs any more when this returns.
    #[track_caller]
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let folder = format!("/proc/{}/task", self.pid());
        let stopped = until(TIME_LIMIT, || {
            let mut threads = std::fs::read_dir(&folder).ok()?.flatten();
            let all = threads.all(|thread| {
                let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
                stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
            });
            all.then_some(())
        });
        assert!(stopped.is_some(), "{} does not stop", self.line);
    }

    /// Continues the stopped program.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Waits at most [`TIME_LIMIT`] for the end of the program.
    pub fn wait(self) -> Ended {
        self.wait_for(TIME_LIMIT)
    }

    /// Ends the program if it does not end soon by itself; returns the output.
    pub fn stopped(self) -> Ended {
        self.signal(Signal::TERM);
        self.wait()
    }

    /// Waits for the end of the program; panics with the output if that takes longer than `limit`.
    pub fn wait_for(mut self, limit: Duration) -> Ended {
        drop(self.child.stdin.take());
        let status = until(limit, || self.ended());
        let Some(status) = status else {
            panic!("{} did not end within {limit:?}:\n{}", self.line, self.output());
        };
        self.output.catch_up();
        Ended {
            line: self.line.clone(),
            status,
            output: self.output(),
        }
    }

    /// The program's name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The group was made for this program and is not reused while the program is not reaped.
        if self.ended().is_none() {
            if let Some(group) = Pid::from_raw(self.child.id().cast_signed()) {
                let _ = kill_process_group(group, Signal::KILL);
            }
            let _ = self.child.wait();
        }
    }
}

/// A program that has ended.
#[derive(Debug)]
pub struct Ended {
    line: String,
    /// The exit status.
    pub status: ExitStatus,
    /// All output, to standard output and error.
    pub output: String,
}

impl Ended {
    /// Whether the program succeeded.
    pub fn ok(&self) -> bool {
        self.status.success()
    }

    /// The output of the program; panics with it if the program failed.
    #[track_caller]
    pub fn success(self) -> String {
        assert!(self.ok(), "{self}");
        self.output
    }

    /// The output of the program; panics with it if the program succeeded, or was ended by a signal
    /// rather than by itself.
    #[track_caller]
    pub fn failure(self) -> String {
        assert!(!self.ok() && self.status.signal().is_none(), "{self}");
        self.output
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}):\n{}", self.line, self.status, self.output)
    }
}
