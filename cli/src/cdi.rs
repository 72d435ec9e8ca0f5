//! `urnic cdi`: the device as a specification of the Container Device Interface, by which podman,
//! containerd, CRI-O and Docker put devices into containers.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use urnic_config::{Config, Device};

use crate::answer::{Failure, print};
use crate::environment::find_plugin;
use crate::options::Options;

/// The oldest version that has every field of ours: runtimes refuse a version later than their own
/// (podman 4.3 later than 0.5.0), and take all earlier ones.
const VERSION: &str = "0.3.0";
/// The device name that means all devices, as other vendors use it.
const ALL: &str = "all";
/// The paths of the files in containers: those of the Debian package, so that a container with this
/// package gets one plug-in, and `urnic` is in PATH.
const PLUGIN: &str = "/usr/lib/urnic/liburnic.so";
const PROGRAM: &str = "/usr/bin/urnic";

/// The arguments of `urnic cdi`.
#[derive(Args, Debug)]
pub(crate) struct CdiArgs {
    #[command(flatten)]
    options: Options,
    /// Write this file, a whole one at any time; runtimes read /etc/cdi/*.json
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The kind of the devices: a domain and a word, to have several files with different options
    #[arg(long, value_name = "DOMAIN/WORD", default_value = "urnic.io/rnic", value_parser = kind)]
    kind: String,
}

/// Writes the specification of the device with these options.
pub(crate) fn specify(args: &CdiArgs) -> Result<ExitCode, Failure> {
    if let Some(file) = &args.output
        && file.extension() != Some(OsStr::new("json"))
    {
        return Err(Failure::usage(format!(
            "--output {}: runtimes read files whose names end in .json",
            file.display()
        )));
    }
    check_written_paths(&args.options)?;
    let (config, variables) = args.options.in_force()?;
    let host = Host {
        plugin: find_plugin().map_err(Failure::runtime)?,
        program: std::env::current_exe().map_err(|error| {
            Failure::runtime(format!("cannot find the path of the urnic program: {error}"))
        })?,
    };
    let spec = specification(&args.kind, &config, variables, &host)?;
    let text = format!("{spec:#}\n");
    let Some(file) = &args.output else {
        return print(&text);
    };
    replace(file, &text)
        .map_err(|error| Failure::runtime(format!("--output {}: {error}", file.display())))?;
    print(&format!(
        "{}: a container gets the device by --device {}={ALL}\n",
        file.display(),
        args.kind
    ))
}

/// The files of this host that containers get.
struct Host {
    plugin: PathBuf,
    program: PathBuf,
}

fn specification(
    kind: &str,
    config: &Config,
    mut variables: BTreeMap<String, OsString>,
    host: &Host,
) -> Result<Value, Failure> {
    let mut mounts = vec![mount(&host.plugin, PLUGIN)?, mount(&host.program, PROGRAM)?];
    // A file that options name and programs read has the same path in the container.
    let mut same_path = |path: &Path| -> Result<(), Failure> {
        if path.is_relative() {
            return Err(Failure::usage(format!(
                "{}: containers get this file at the same path: give an absolute one",
                path.display()
            )));
        }
        mounts.push(mount(path, text(path.as_os_str())?)?);
        Ok(())
    };
    let named = variables.get("URNIC_CONFIG").filter(|path| !path.is_empty());
    let named = named
        .map(Path::new)
        .into_iter()
        .chain(config.suppressions.as_deref());
    for path in named {
        same_path(path)?;
    }
    let each = config.each_device();
    for device in &each {
        match &device.device {
            Device::Inproc => {}
            Device::VfioUser(socket) => same_path(socket)?,
            Device::Vfio(_) => {
                return Err(Failure::usage(format!(
                    "{}: a container gets no PCI function by CDI: use inproc, or urnic serve and vfio-user",
                    device.device
                )));
            }
        }
    }

    // These two are the difference between the devices of the file.
    for name in ["URNIC_NAME", "URNIC_DEVICES"] {
        variables.remove(name);
    }
    let mut env = vec![format!("LD_PRELOAD={PLUGIN}")];
    for (name, value) in &variables {
        env.push(format!("{name}={}", text(value)?));
    }
    let shown =
        |name: &str, count: usize| json!([format!("URNIC_NAME={name}"), format!("URNIC_DEVICES={count}")]);
    let mut devices = vec![json!({"name": ALL, "containerEdits": {"env": shown(&config.name, each.len())}})];
    // A section of the file cannot be chosen by variables.
    if config.sections.len() < 2 {
        for device in &each {
            devices.push(json!({
                "name": device_name(&device.name)?,
                "containerEdits": {"env": shown(&device.name, 1)},
            }));
        }
    }
    Ok(json!({
        "cdiVersion": VERSION,
        "kind": kind,
        "containerEdits": {"env": env, "mounts": mounts},
        "devices": devices,
    }))
}

/// A read-only mount of a file. A program can connect to a socket that is mounted so.
fn mount(from: &Path, to: &str) -> Result<Value, Failure> {
    Ok(json!({
        "hostPath": text(from.as_os_str())?,
        "containerPath": to,
        "options": ["bind", "ro", "nosuid", "nodev"],
    }))
}

fn text(value: &OsStr) -> Result<&str, Failure> {
    let error = || Failure::usage(format!("{}: not UTF-8, which JSON requires", value.display()));
    value.to_str().ok_or_else(error)
}

/// The name, if CDI permits it.
fn device_name(name: &str) -> Result<&str, Failure> {
    let first_and_last = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric());
    let all = name
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || "_-.:".contains(c));
    match first_and_last && all && name != ALL {
        true => Ok(name),
        false => Err(Failure::usage(format!(
            "name={name}: a device of CDI has letters, digits and _-.: in its name, begins with a letter, ends with a letter or \
             digit, and is not called {ALL}"
        ))),
    }
}

/// Parses the kind of a device. CDI permits dots in the word from version 0.6.0 on only.
fn kind(text: &str) -> Result<String, String> {
    let word = |word: &str, more: &str, most: usize| {
        let edge = |c: char| c.is_ascii_alphanumeric();
        word.len() <= most
            && word.starts_with(edge)
            && word.ends_with(edge)
            && word
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || more.contains(c))
    };
    let good = text.split_once('/').is_some_and(|(domain, class)| {
        domain.len() <= 253
            && domain.split('.').all(|label| word(label, "-", 63))
            && class.starts_with(|c: char| c.is_ascii_alphabetic())
            && word(class, "_-", 63)
    });
    match good {
        true => Ok(text.to_owned()),
        false => Err("not DOMAIN/WORD, as urnic.io/rnic".to_owned()),
    }
}

/// Checks the files that programs write: their paths are those of the container.
fn check_written_paths(options: &Options) -> Result<(), Failure> {
    let written = [
        ("--pcap", &options.pcap),
        ("--report", &options.report),
        ("--trace", &options.trace),
    ];
    for (flag, path) in written {
        if let Some(path) = path.as_ref().filter(|path| path.is_relative()) {
            return Err(Failure::usage(format!(
                "{flag} {}: the file is in the container: give an absolute path",
                path.display()
            )));
        }
    }
    Ok(())
}

/// Makes the file, and its folder if there is none. A runtime that reads it at the same time gets
/// the old file or the new one.
fn replace(file: &Path, text: &str) -> std::io::Result<()> {
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    fs::create_dir_all(folder)?;
    // Runtimes ignore files with another ending.
    let new = folder.join(format!(".urnic-cdi.{}", std::process::id()));
    let written = fs::File::create_new(&new)
        .and_then(|mut to| to.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&new, file));
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        Host {
            plugin: "/opt/urnic/lib/urnic/liburnic.so".into(),
            program: "/opt/urnic/bin/urnic".into(),
        }
    }

    /// The specification of these variables.
    fn spec(variables: &[(&str, &str)]) -> Result<Value, Failure> {
        let variables: BTreeMap<String, OsString> = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), OsString::from(value)))
            .collect();
        let all = variables
            .iter()
            .map(|(name, value)| (OsString::from(name), value.clone()));
        let config = Config::from_vars(all).expect("good options");
        specification("urnic.io/rnic", &config, variables, &host())
    }

    #[test]
    fn a_container_gets_only_the_library_and_its_environment() {
        let read_only = ["bind", "ro", "nosuid", "nodev"];
        assert_eq!(
            spec(&[("URNIC_IDENTITY", "roce")]).expect("good"),
            json!({
                "cdiVersion": "0.3.0",
                "kind": "urnic.io/rnic",
                "containerEdits": {
                    "env": ["LD_PRELOAD=/usr/lib/urnic/liburnic.so", "URNIC_IDENTITY=roce"],
                    "mounts": [
                        {
                            "hostPath": "/opt/urnic/lib/urnic/liburnic.so",
                            "containerPath": "/usr/lib/urnic/liburnic.so",
                            "options": read_only,
                        },
                        {
                            "hostPath": "/opt/urnic/bin/urnic",
                            "containerPath": "/usr/bin/urnic",
                            "options": read_only,
                        },
                    ],
                },
                "devices": [
                    {"name": "all", "containerEdits": {"env": ["URNIC_NAME=urnic0", "URNIC_DEVICES=1"]}},
                    {"name": "urnic0", "containerEdits": {"env": ["URNIC_NAME=urnic0", "URNIC_DEVICES=1"]}},
                ],
            })
        );
    }

    #[test]
    fn each_device_can_be_chosen_alone() {
        let spec = spec(&[("URNIC_NAME", "mlx5_2"), ("URNIC_DEVICES", "2")]).expect("good");
        let env =
            |name: &str, count: u32| json!([format!("URNIC_NAME={name}"), format!("URNIC_DEVICES={count}")]);
        assert_eq!(
            spec["devices"],
            json!([
                {"name": "all", "containerEdits": {"env": env("mlx5_2", 2)}},
                {"name": "mlx5_2", "containerEdits": {"env": env("mlx5_2", 1)}},
                {"name": "mlx5_3", "containerEdits": {"env": env("mlx5_3", 1)}},
            ])
        );
        assert_eq!(
            spec["containerEdits"]["env"],
            json!(["LD_PRELOAD=/usr/lib/urnic/liburnic.so"])
        );
    }

    #[test]
    fn files_that_options_name_keep_their_paths() {
        let spec = spec(&[
            ("URNIC_DEVICE", "vfio-user:/run/nic.sock"),
            ("URNIC_SUPPRESSIONS", "/etc/urnic.supp"),
        ])
        .expect("good");
        let mounts = spec["containerEdits"]["mounts"].as_array().expect("mounts");
        let paths: Vec<_> = mounts
            .iter()
            .skip(2)
            .map(|mount| (mount["hostPath"].as_str(), mount["containerPath"].as_str()))
            .collect();
        let same = |path| (Some(path), Some(path));
        assert_eq!(paths, [same("/etc/urnic.supp"), same("/run/nic.sock")]);
    }

    #[test]
    fn what_cdi_cannot_express_is_refused() {
        for (variables, says) in [
            (
                ("URNIC_DEVICE", "vfio:0000:01:00.0"),
                "a container gets no PCI function",
            ),
            (("URNIC_SUPPRESSIONS", "urnic.supp"), "give an absolute one"),
            (("URNIC_NAME", "all"), "is not called all"),
            (("URNIC_NAME", "0rnic"), "begins with a letter"),
        ] {
            let failure = spec(&[variables]).expect_err("refused");
            assert_eq!(failure.status, 2);
            assert!(failure.message.contains(says), "{}", failure.message);
        }
        for path in ["r.json", "./r.json"] {
            let options = Options {
                report: Some(path.into()),
                ..Options::default()
            };
            let failure = check_written_paths(&options).expect_err("refused");
            assert!(
                failure.message.contains("give an absolute path"),
                "{}",
                failure.message
            );
        }
    }

    #[test]
    fn a_kind_is_a_domain_and_a_word() {
        for good in ["urnic.io/rnic", "example/roce-2", "a.b-c.d/x_y"] {
            assert_eq!(kind(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            "rnic",
            "/rnic",
            "urnic.io/",
            "a/b/c",
            "a..b/c",
            "-a/c",
            "a/c.d",
            "a/9",
            "a_b/c",
        ] {
            assert!(kind(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_file_is_replaced_and_nothing_else_is_left() {
        let folder = urnic_testkit::Folder::new("cdi");
        let file = folder.file("new/urnic.json");
        for text in ["first\n", "second\n"] {
            replace(&file, text).expect("our folder");
            assert_eq!(fs::read_to_string(&file).expect("written"), text);
        }
        let names: Vec<_> = fs::read_dir(folder.file("new"))
            .expect("made")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        assert_eq!(names, ["urnic.json"]);
        // A folder is in the place of the file.
        replace(&folder.file("new"), "third\n").expect_err("refused");
        assert_eq!(fs::read_dir(folder.path()).expect("ours").count(), 1);
    }
}
