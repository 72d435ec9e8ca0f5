//! The devices of a process: names, addresses, and the way to each.

use std::net::IpAddr;

use toml::Value;

use crate::error::{Error, Source};
use crate::names::{LONGEST_NAME, counted, is_name};
use crate::options;
use crate::settings::{Config, Device, DeviceConfig, Section};

impl Config {
    /// The devices of the process, at least one.
    pub fn each_device(&self) -> Vec<DeviceConfig> {
        if self.sections.is_empty() {
            let device = |count| DeviceConfig {
                name: counted(&self.name, count),
                addresses: Vec::new(),
                device: self.device.clone(),
            };
            return (0..self.devices).map(device).collect();
        }
        let device = |(count, section): (u32, &Section)| DeviceConfig {
            name: section.name.clone().unwrap_or_else(|| counted(&self.name, count)),
            addresses: section.addresses.clone(),
            device: section.device.clone().unwrap_or_else(|| self.device.clone()),
        };
        (0..).zip(&self.sections).map(device).collect()
    }

    /// The configuration of one of the devices.
    pub fn of_device(&self, device: &DeviceConfig) -> Config {
        Config {
            device: device.device.clone(),
            name: device.name.clone(),
            devices: 1,
            sections: Vec::new(),
            ..self.clone()
        }
    }

    /// Checks that the devices differ where they must.
    pub(crate) fn check_devices(&self) -> Result<(), Error> {
        let sections = self.sections.len();
        // 1 is also the value of an option that was not set.
        if sections > 0 && self.devices != 1 && self.devices as usize != sections {
            return Err(Error::Devices(format!(
                "devices={}, but the file has {sections} [[device]] sections: leave out one of both",
                self.devices
            )));
        }
        let devices = self.each_device();
        for (index, device) in devices.iter().enumerate() {
            let fail = |message: String| match self.sections.get(index) {
                Some(section) => Error::Section {
                    message,
                    at: section.at.clone(),
                },
                None => Error::Devices(format!("devices={}: a device {message}", devices.len())),
            };
            let before = devices.get(..index).unwrap_or_default();
            if !is_name(&device.name) {
                return Err(fail(format!(
                    "would be named {}, which is longer than {LONGEST_NAME} bytes: give a shorter name",
                    device.name
                )));
            }
            if before.iter().any(|other| other.name == device.name) {
                return Err(fail(format!(
                    "is named {} like another: give each its own name",
                    device.name
                )));
            }
            let claimed = |ip: &&IpAddr| before.iter().any(|other| other.addresses.contains(ip));
            if let Some(ip) = device.addresses.iter().find(claimed) {
                return Err(fail(format!(
                    "has the address {ip} as another has: give it to one of them"
                )));
            }
            if !device.addresses.is_empty() && device.device != Device::Inproc {
                return Err(fail(format!(
                    "cannot have addresses: {} has its own; leave them out",
                    device.device
                )));
            }
            let is_function = matches!(device.device, Device::Vfio(_));
            if is_function && before.iter().any(|other| other.device == device.device) {
                return Err(fail(format!(
                    "is {} like another: give each its own function",
                    device.device
                )));
            }
        }
        Ok(())
    }
}

impl Section {
    /// Reads a `[[device]]`. `source` returns the place of the section, or of a key of it, given
    /// with a dot before the key.
    pub(crate) fn read(value: &Value, source: impl Fn(&str) -> Source) -> Result<Section, Error> {
        let wrong = |message: String, key: &str| Error::Section {
            message,
            at: source(key),
        };
        let Value::Table(table) = value else {
            return Err(wrong("is a section of its own".to_owned(), ""));
        };
        let mut section = Section {
            name: None,
            addresses: Vec::new(),
            device: None,
            at: source(""),
        };
        for (key, value) in table {
            let at = source(&format!(".{key}"));
            let text = options::text_of(value);
            let mut read = Config::default();
            match key.as_str() {
                "name" => {
                    read.set("name", &text, at)?;
                    section.name = Some(read.name);
                }
                "device" => {
                    read.set("device", &text, at)?;
                    section.device = Some(read.device);
                }
                "addresses" => {
                    section.addresses = addresses(value).map_err(|text| Error::Value {
                        key: "addresses",
                        value: text.escape_debug().to_string(),
                        expected: "a list of different IP addresses of this host, as [\"192.0.2.7\"]"
                            .to_owned(),
                        at,
                    })?
                }
                _ => {
                    return Err(wrong(
                        format!("cannot have {key}: it takes name, addresses and device"),
                        &format!(".{key}"),
                    ));
                }
            }
        }
        Ok(section)
    }
}

/// The addresses in a list; the text that is not a further address, if there is one.
fn addresses(value: &Value) -> Result<Vec<IpAddr>, String> {
    let Value::Array(elements) = value else {
        return Err(options::text_of(value));
    };
    let mut addresses: Vec<IpAddr> = Vec::new();
    for element in elements {
        let text = options::bare(element);
        match text.parse::<IpAddr>() {
            Ok(ip) if !ip.is_unspecified() && !ip.is_multicast() && !addresses.contains(&ip) => {
                addresses.push(ip);
            }
            _ => return Err(text),
        }
    }
    if addresses.is_empty() {
        return Err(String::new());
    }
    Ok(addresses)
}
