//! Accelerators: by NVML on Linux, by the chip's name on a Mac.

use shared::bus::{Gpu, Memory};

#[cfg(not(target_os = "macos"))]
mod nvidia {
    use super::{Gpu, Memory};
    use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
    use nvml_wrapper::{Device, Nvml};

    /// NVIDIA's library, where there is one.
    pub(crate) struct Gpus(Option<Nvml>);

    impl Gpus {
        /// Loads the library; a machine without one has no GPU that can be seen.
        pub(crate) fn open() -> Self {
            let opened = Nvml::init();
            if let Err(error) = &opened {
                tracing::info!(%error, "no NVIDIA GPU to be seen");
            }
            Self(opened.ok())
        }

        /// All devices as they are now.
        pub(crate) fn look(&self, memory: Memory) -> Vec<Gpu> {
            let Some(nvml) = &self.0 else { return Vec::new() };
            let count = nvml.device_count().unwrap_or(0);
            (0..count).filter_map(|i| nvml.device_by_index(i).ok()).map(|d| describe(&d, memory)).collect()
        }
    }

    fn describe(device: &Device<'_>, memory: Memory) -> Gpu {
        // A device that shares the machine's memory (GB10) does not tell any of its own.
        let own = device.memory_info().ok().filter(|m| m.total > 0);
        Gpu {
            name: device.name().unwrap_or_else(|_| "NVIDIA".to_owned()),
            memory_total_bytes: own.as_ref().map_or(memory.total_bytes, |m| m.total),
            memory_used_bytes: own.as_ref().map_or(memory.used_bytes, |m| m.used),
            busy: device.utilization_rates().ok().map(|u| f64::from(u.gpu) / 100.0),
            temperature_c: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
            power_w: device.power_usage().ok().map(|mw| f64::from(mw) / 1000.0),
        }
    }
}

#[cfg(target_os = "macos")]
mod apple {
    use super::{Gpu, Memory};

    /// The chip's name.
    pub(crate) struct Gpus(Option<String>);

    impl Gpus {
        /// Asks the system once.
        pub(crate) fn open() -> Self {
            let out = std::process::Command::new("/usr/sbin/sysctl")
                .args(["-n", "machdep.cpu.brand_string"])
                .output();
            let name = out.ok().and_then(|o| String::from_utf8(o.stdout).ok()).map(|n| n.trim().to_owned());
            Self(name.filter(|n| n.starts_with("Apple")))
        }

        /// The one device, which shares the machine's memory.
        pub(crate) fn look(&self, memory: Memory) -> Vec<Gpu> {
            let gpu = |name: &String| Gpu {
                name: name.clone(),
                memory_total_bytes: memory.total_bytes,
                memory_used_bytes: memory.used_bytes,
                ..Gpu::default()
            };
            self.0.iter().map(gpu).collect()
        }
    }
}

#[cfg(target_os = "macos")]
pub(super) use apple::Gpus;
#[cfg(not(target_os = "macos"))]
pub(super) use nvidia::Gpus;
