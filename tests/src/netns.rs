//! A network of namespaces on this machine whose cables can be cut. Needs root and iproute2.

use std::process::Command;

/// Frames to this address are taken by nobody.
const NOWHERE: &str = "02:00:00:00:00:99";

/// Places with an address each, all on one switch; the test itself is on it too.
pub struct Network {
    tag: String,
    subnet: String,
    places: Vec<String>,
}

fn ip(args: &[&str]) -> Result<(), String> {
    let out = Command::new("ip").args(args).output().map_err(|e| e.to_string())?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&out.stderr).trim()))
}

impl Network {
    /// Builds it; `Err` says why this machine can't.
    ///
    /// # Errors
    /// No root, no iproute2, no namespaces.
    pub fn new(places: &[&str]) -> Result<Self, String> {
        let pid = std::process::id();
        let tag = format!("pd{}", pid % 100_000);
        let subnet = format!("10.{}.{}", 200 + pid % 50, pid / 50 % 250);
        let network = Self { tag, subnet, places: places.iter().map(|p| (*p).to_owned()).collect() };
        network.build()?;
        Ok(network)
    }

    fn build(&self) -> Result<(), String> {
        let bridge = self.bridge();
        ip(&["link", "add", &bridge, "type", "bridge"])?;
        for host in [self.here(), self.bus()] {
            ip(&["addr", "add", &format!("{host}/24"), "dev", &bridge])?;
        }
        ip(&["link", "set", &bridge, "up"])?;
        for place in &self.places {
            let (netns, outer) = (self.netns(place), format!("{}{place}", self.tag));
            ip(&["netns", "add", &netns])?;
            ip(&["link", "add", &outer, "type", "veth", "peer", "name", "eth0", "netns", &netns])?;
            ip(&["link", "set", &outer, "master", &bridge, "up"])?;
            let inside = |args: &[&str]| ip(&[&["-n", &netns], args].concat());
            inside(&["addr", "add", &format!("{}/24", self.ip(place)), "dev", "eth0"])?;
            inside(&["link", "set", "eth0", "up"])?;
            inside(&["link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    /// The test's own address.
    #[must_use]
    pub fn here(&self) -> String {
        format!("{}.1", self.subnet)
    }

    /// A second address of the test, for a server that can be cut off without the test.
    #[must_use]
    pub fn bus(&self) -> String {
        format!("{}.250", self.subnet)
    }

    /// A place's address.
    #[must_use]
    pub fn ip(&self, place: &str) -> String {
        let index = self.places.iter().position(|p| p == place).unwrap();
        format!("{}.{}", self.subnet, index + 2)
    }

    /// A place's namespace.
    #[must_use]
    pub fn netns(&self, place: &str) -> String {
        format!("{}-{place}", self.tag)
    }

    /// Cuts the cable between two places: what they send each other is lost without a word.
    pub fn cut(&self, a: &str, b: &str) {
        for (from, to) in [(a, b), (b, a)] {
            self.lose(from, &self.ip(to));
        }
    }

    /// Mends it.
    pub fn mend(&self, a: &str, b: &str) {
        for (from, to) in [(a, b), (b, a)] {
            self.find(from, &self.ip(to));
        }
    }

    /// Whatever a place sends to [`Self::bus`] is lost.
    pub fn cut_bus(&self, place: &str) {
        self.lose(place, &self.bus());
    }

    /// Mends that.
    pub fn mend_bus(&self, place: &str) {
        self.find(place, &self.bus());
    }

    fn lose(&self, place: &str, to: &str) {
        let netns = self.netns(place);
        ip(&["-n", &netns, "neigh", "replace", to, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent"])
            .unwrap();
    }

    fn find(&self, place: &str, to: &str) {
        ip(&["-n", &self.netns(place), "neigh", "del", to, "dev", "eth0"]).unwrap();
    }

    fn bridge(&self) -> String {
        format!("{}br", self.tag)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for place in &self.places {
            let _ = ip(&["netns", "del", &self.netns(place)]);
            let _ = ip(&["link", "del", &format!("{}{place}", self.tag)]);
        }
        let _ = ip(&["link", "del", &self.bridge()]);
    }
}
