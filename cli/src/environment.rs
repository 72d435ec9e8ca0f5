//! The environment that makes the RNIC present: the plug-in in LD_PRELOAD and the options in URNIC_
//! variables.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use urnic_config::{Config, OPTIONS, Source};

use crate::answer::Failure;
use crate::fault_file::specification;
use crate::options::Options;
use crate::serve::LONGEST_SOCKET_PATH;

/// Name of the plug-in's file.
pub(crate) const PLUGIN: &str = "liburnic.so";

/// Forms in which the variables are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// `export` lines for a POSIX shell.
    Sh,
    /// Lines for the file $GITHUB_ENV.
    Github,
    /// `ENV` lines of a Dockerfile.
    Docker,
    /// A JSON object.
    Json,
}

/// The variables to set, and their values.
#[derive(Debug)]
pub(crate) struct Environment {
    /// The options in force, from all sources.
    pub(crate) config: Config,
    variables: BTreeMap<String, OsString>,
}

impl Environment {
    /// Finds the plug-in and checks the options, so that mistakes are reported here and not while a
    /// program runs.
    pub(crate) fn new(options: &Options) -> Result<Self, Failure> {
        let mut variables = options.variables()?;
        let config = configured(&variables)?;
        let plugin = find_plugin().map_err(Failure::runtime)?;
        variables.insert(
            "LD_PRELOAD".to_owned(),
            preload(&plugin, env::var_os("LD_PRELOAD"))?,
        );
        variables.insert(ASAN_OPTIONS.to_owned(), asan_options(env::var_os(ASAN_OPTIONS)));
        Ok(Self { config, variables })
    }

    /// The variables, for a child's environment.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&String, &OsString)> {
        self.variables.iter()
    }

    /// The variables in this form.
    pub(crate) fn printed(&self, format: Format) -> String {
        let each = self.variables.iter();
        let text = |value: &OsString| value.to_string_lossy().into_owned();
        match format {
            Format::Sh => each
                .map(|(name, value)| format!("export {name}={}\n", quoted(value)))
                .collect(),
            // No value has a line break: neither options nor paths that the loader accepts have
            // one.
            Format::Github => each
                .map(|(name, value)| format!("{name}={}\n", text(value)))
                .collect(),
            Format::Docker => each
                .map(|(name, value)| format!("ENV {name}={}\n", in_double_quotes(&text(value))))
                .collect(),
            Format::Json => {
                let all: BTreeMap<&String, String> = each.map(|(name, value)| (name, text(value))).collect();
                serde_json::json!(all).to_string() + "\n"
            }
        }
    }
}

fn configured(variables: &BTreeMap<String, OsString>) -> Result<Config, Failure> {
    Config::from_vars(overlaid(env::vars_os(), variables)).map_err(Failure::usage)
}

impl Options {
    /// The options in force, from all sources.
    pub(crate) fn config(&self) -> Result<Config, Failure> {
        configured(&self.variables()?)
    }

    /// The options in force, and the variables that give them to a process that does not inherit
    /// this environment.
    pub(crate) fn in_force(&self) -> Result<(Config, BTreeMap<String, OsString>), Failure> {
        let flags = self.variables()?;
        let config = configured(&flags)?;
        let is_option = |name: &str| {
            ["URNIC_CONFIG", "URNIC_SET"].contains(&name) || OPTIONS.iter().any(|opt| opt.variable() == name)
        };
        let variables = overlaid(env::vars_os(), &flags)
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .filter(|(name, _)| is_option(name))
            .collect();
        Ok((config, variables))
    }

    /// The flags as variables. `--set` becomes the option's own variable, which overrides URNIC_SET
    /// and the file.
    fn variables(&self) -> Result<BTreeMap<String, OsString>, Failure> {
        let mut variables = BTreeMap::new();
        for pair in &self.set {
            let pieces = pair.split_once('=').filter(|(key, _)| !key.trim().is_empty());
            let Some((key, value)) = pieces else {
                return Err(Failure::usage(format!(
                    "--set {pair}: not KEY=VALUE; `urnic run --help` lists the keys"
                )));
            };
            Config::default()
                .set(key.trim(), value, Source::Flag("--set"))
                .map_err(Failure::usage)?;
            let opt = OPTIONS.iter().find(|opt| opt.key == key.trim());
            variables.extend(opt.map(|opt| (opt.variable(), OsString::from(value))));
        }
        let mut set = |name: &str, value: Option<OsString>| {
            variables.extend(value.map(|value| (name.to_owned(), value)));
        };
        set("URNIC_DEVICE", self.device()?);
        set("URNIC_NAME", checked("name", "--name", &self.name)?);
        set("URNIC_DEVICES", checked("devices", "--devices", &self.devices)?);
        set(
            "URNIC_IDENTITY",
            checked("identity", "--identity", &self.identity)?,
        );
        set("URNIC_REAL_DEVICES", self.only.then(|| "hidden".into()));
        set("URNIC_LOG", self.log.as_ref().map(OsString::from));
        // The program may run in another folder.
        set("URNIC_CONFIG", absolute(self.config.as_deref())?);
        set("URNIC_PCAP", absolute(self.pcap.as_deref())?);
        set("URNIC_TRACE", absolute(self.trace.as_deref())?);
        set("URNIC_REPORT", absolute(self.report.as_deref())?);
        set("URNIC_FAULTS", self.faults()?);
        set("URNIC_STRICT", checked("strict", "--strict", &self.strict)?);
        set("URNIC_SUPPRESSIONS", absolute(self.suppressions.as_deref())?);
        Ok(variables)
    }

    /// The faults, also if they are in a file.
    fn faults(&self) -> Result<Option<OsString>, Failure> {
        let Some(given) = &self.faults else {
            return Ok(None);
        };
        let faults =
            specification(given).map_err(|error| Failure::usage(format!("--faults {given}: {error}")))?;
        let faults = if faults.is_empty() { "none" } else { &faults };
        Ok(Some(faults.into()))
    }

    fn device(&self) -> Result<Option<OsString>, Failure> {
        let Some(device) = &self.device else {
            return Ok(None);
        };
        let Some(path) = device.strip_prefix("vfio-user:").filter(|path| !path.is_empty()) else {
            return checked("device", "--device", &self.device);
        };
        let path = absolute(Some(Path::new(path)))?.unwrap_or_default();
        if path.len() > LONGEST_SOCKET_PATH {
            return Err(Failure::usage(format!(
                "--device {device}: a socket's path has at most {LONGEST_SOCKET_PATH} bytes, not {}",
                path.len()
            )));
        }
        let mut value = OsString::from("vfio-user:");
        value.push(path);
        Ok(Some(value))
    }
}

/// The value of a flag that takes the same values as an option; the error line names the flag.
fn checked(key: &str, flag: &'static str, value: &Option<String>) -> Result<Option<OsString>, Failure> {
    let Some(value) = value else { return Ok(None) };
    Config::default()
        .set(key, value, Source::Flag(flag))
        .map_err(Failure::usage)?;
    Ok(Some(value.into()))
}

fn absolute(path: Option<&Path>) -> Result<Option<OsString>, Failure> {
    let Some(path) = path else { return Ok(None) };
    match std::path::absolute(path) {
        Ok(path) => Ok(Some(path.into_os_string())),
        Err(error) => Err(Failure::usage(format!("{}: {error}", path.display()))),
    }
}

fn overlaid(
    base: impl Iterator<Item = (OsString, OsString)>,
    over: &BTreeMap<String, OsString>,
) -> impl Iterator<Item = (OsString, OsString)> {
    let kept = base.filter(|(name, _)| !name.to_str().is_some_and(|name| over.contains_key(name)));
    kept.chain(
        over.iter()
            .map(|(name, value)| (OsString::from(name), value.clone())),
    )
}

/// The path of this program; without /proc, the one by which it was started.
pub(crate) fn program_file() -> Result<PathBuf, String> {
    env::current_exe().or_else(|error| {
        let started = OsStr::from_bytes(rustix::param::linux_execfn().to_bytes());
        std::fs::canonicalize(started)
            .map_err(|_| format!("cannot find the path of the urnic program: {error}"))
    })
}

/// The plug-in's file: `URNIC_LIB`, or its place relative to this program, built or installed.
pub(crate) fn find_plugin() -> Result<PathBuf, String> {
    if let Some(path) = env::var_os("URNIC_LIB").map(PathBuf::from) {
        return match path.is_file() {
            true => {
                std::path::absolute(&path).map_err(|error| format!("URNIC_LIB={}: {error}", path.display()))
            }
            false => Err(format!("URNIC_LIB={}: there is no such file", path.display())),
        };
    }
    let program = program_file()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let above = folder.parent().unwrap_or(folder);
    let places = [
        folder.join(PLUGIN),
        above.join("lib/urnic").join(PLUGIN),
        above.join("lib").join(PLUGIN),
    ];
    if let Some(found) = places.iter().find(|place| place.is_file()) {
        return Ok(found.clone());
    }
    let places: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
    Err(format!(
        "{PLUGIN} is at none of {}: run `make build`, or set URNIC_LIB",
        places.join(", ")
    ))
}

/// Options of AddressSanitizer's runtime.
const ASAN_OPTIONS: &str = "ASAN_OPTIONS";

/// Lets AddressSanitizer's runtime come after the plug-in in the list of preloaded libraries. The
/// plug-in sets the same option by `__asan_default_options`, which has no effect on programs that
/// define that function themselves.
fn asan_options(before: Option<OsString>) -> OsString {
    const OPTION: &str = "verify_asan_link_order";
    let mut options = before.unwrap_or_default();
    if !options.to_string_lossy().contains(OPTION) {
        if !options.is_empty() {
            options.push(":");
        }
        options.push(format!("{OPTION}=0"));
    }
    options
}

/// Whether the library is the runtime of a sanitizer, by the names of gcc's and clang's.
/// AddressSanitizer's runtime requires to be the first library.
fn is_sanitizer(library: &[u8]) -> bool {
    let name = library.rsplit(|byte| *byte == b'/').next().unwrap_or(library);
    let runtimes: [&[u8]; 6] = [
        b"libasan",
        b"libhwasan",
        b"liblsan",
        b"libtsan",
        b"libubsan",
        b"libclang_rt.",
    ];
    runtimes.iter().any(|runtime| name.starts_with(runtime))
}

/// The plug-in before the libraries that are preloaded already, and after the runtimes of
/// sanitizers.
fn preload(plugin: &Path, before: Option<OsString>) -> Result<OsString, Failure> {
    let ours = plugin.as_os_str().as_bytes();
    // The loader splits at both and has no quotes (ld.so(8)).
    if ours.iter().any(|byte| b" :".contains(byte)) {
        let path = plugin.display();
        return Err(Failure::runtime(format!(
            "{path}: LD_PRELOAD takes no path with a space or colon: move it"
        )));
    }
    let before = before.unwrap_or_default();
    let others = before
        .as_bytes()
        .split(|byte| b" :".contains(byte))
        .filter(|other| !other.is_empty() && *other != ours);
    let (first, last): (Vec<_>, Vec<_>) = others.partition(|other| is_sanitizer(other));
    let list = [first, vec![ours], last].concat();
    Ok(OsString::from_vec(list.join(&b':')))
}

/// `value` as a Dockerfile reads it back unchanged.
fn in_double_quotes(value: &str) -> String {
    let mut text = String::from('"');
    for c in value.chars() {
        if "\\\"$".contains(c) {
            text.push('\\');
        }
        text.push(c);
    }
    text.push('"');
    text
}

/// The words of a command, so that a shell reads them back unchanged.
pub(crate) fn quoted_words(words: &[OsString]) -> String {
    let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    words.join(" ")
}

/// `value` quoted so that a shell reads it back unchanged.
fn quoted(value: &OsStr) -> String {
    let text = value.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.into_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plug_in_goes_in_front_once() {
        let preload =
            |before: Option<&str>| preload(Path::new("/l/a.so"), before.map(OsString::from)).expect("good");
        assert_eq!(preload(None), "/l/a.so");
        assert_eq!(preload(Some("")), "/l/a.so");
        assert_eq!(preload(Some("b.so /l/a.so:c.so")), "/l/a.so:b.so:c.so");
    }

    #[test]
    fn a_sanitizer_stays_in_front_of_the_plug_in() {
        let preload = |before: &str| preload(Path::new("/l/a.so"), Some(before.into())).expect("good");
        assert_eq!(
            preload("b.so:/usr/lib/libasan.so.8:libtsan.so.2"),
            "/usr/lib/libasan.so.8:libtsan.so.2:/l/a.so:b.so"
        );
        assert_eq!(
            preload("/x/libclang_rt.asan-x86_64.so"),
            "/x/libclang_rt.asan-x86_64.so:/l/a.so"
        );
    }

    #[test]
    fn the_users_sanitizer_options_are_kept() {
        let options = |before: Option<&str>| asan_options(before.map(OsString::from));
        assert_eq!(options(None), "verify_asan_link_order=0");
        assert_eq!(
            options(Some("detect_leaks=0")),
            "detect_leaks=0:verify_asan_link_order=0"
        );
        assert_eq!(
            options(Some("verify_asan_link_order=1")),
            "verify_asan_link_order=1"
        );
    }

    #[test]
    fn a_path_that_the_loader_would_split_is_refused() {
        let failure = preload(Path::new("/my libs/a.so"), None).expect_err("refused");
        assert!(
            failure.message.starts_with("/my libs/a.so: "),
            "{}",
            failure.message
        );
    }

    #[test]
    fn quoting_survives_a_shell() {
        for value in [
            "plain/path.so",
            "two words",
            "it's",
            "$HOME `id` \"x\" \\",
            "",
            "a\nb",
            "*",
        ] {
            let script = format!("printf %s {}", quoted(OsStr::new(value)));
            let out = std::process::Command::new("sh")
                .args(["-c", &script])
                .output()
                .expect("sh");
            assert_eq!(String::from_utf8_lossy(&out.stdout), value);
        }
    }

    #[test]
    fn each_format_has_every_variable() {
        let environment = Environment {
            config: Config::default(),
            variables: BTreeMap::from([
                ("LD_PRELOAD".to_owned(), OsString::from("/l/a.so")),
                ("URNIC_FAULTS".to_owned(), OsString::from("drop p=1; \"$x\"")),
            ]),
        };
        for (format, text) in [
            (
                Format::Sh,
                "export LD_PRELOAD=/l/a.so\nexport URNIC_FAULTS='drop p=1; \"$x\"'\n",
            ),
            (
                Format::Github,
                "LD_PRELOAD=/l/a.so\nURNIC_FAULTS=drop p=1; \"$x\"\n",
            ),
            (
                Format::Docker,
                "ENV LD_PRELOAD=\"/l/a.so\"\nENV URNIC_FAULTS=\"drop p=1; \\\"\\$x\\\"\"\n",
            ),
            (
                Format::Json,
                "{\"LD_PRELOAD\":\"/l/a.so\",\"URNIC_FAULTS\":\"drop p=1; \\\"$x\\\"\"}\n",
            ),
        ] {
            assert_eq!(environment.printed(format), text);
        }
    }

    #[test]
    fn flags_become_variables() {
        let options = Options {
            set: vec!["mpa.crc=false".into(), "mpa.rtr_types=write,read".into()],
            config: Some("conf.toml".into()),
            log: Some("debug".into()),
            ..Options::default()
        };
        let variables = options.variables().expect("good");
        assert_eq!(variables["URNIC_MPA_CRC"], "false");
        assert_eq!(variables["URNIC_MPA_RTR_TYPES"], "write,read");
        assert_eq!(variables["URNIC_LOG"], "debug");
        assert!(Path::new(&variables["URNIC_CONFIG"]).is_absolute());
        assert_eq!(variables.len(), 4);
    }

    #[test]
    fn a_bad_set_is_a_usage_error_that_names_it() {
        for (set, says) in [
            ("mpa.crc", "--set mpa.crc: not KEY=VALUE"),
            ("mpa.crv=1", "did you mean mpa.crc?"),
        ] {
            let failure = Options {
                set: vec![set.into()],
                ..Options::default()
            }
            .variables()
            .expect_err("refused");
            assert_eq!(failure.status, 2);
            assert!(failure.message.contains(says), "{}", failure.message);
        }
    }

    #[test]
    fn flags_win_over_variables() {
        let base = [("URNIC_LOG", "info"), ("PATH", "/bin")];
        let over = BTreeMap::from([("URNIC_LOG".to_owned(), OsString::from("debug"))]);
        let base = base
            .iter()
            .map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let all: BTreeMap<_, _> = overlaid(base, &over).collect();
        assert_eq!(all[OsStr::new("URNIC_LOG")], "debug");
        assert_eq!(all[OsStr::new("PATH")], "/bin");
    }
}
