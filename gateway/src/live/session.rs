//! Sessions of browsers on the live page.
//!
//! A browser cannot send an `Authorization` header with a WebSocket it opens, so the page, once shown to someone who
//! knows the admin key, leaves a cookie that the socket accepts. The cookie proves its own origin (a keyed hash with
//! a secret of this process) and expiry; nothing is stored, and a restart ends all sessions.

use std::time::{Duration, SystemTime, UNIX_EPOCH};
use subtle::ConstantTimeEq as _;

/// Name of the cookie.
const COOKIE: &str = "pd_bridge_live";
/// How long a browser may reconnect without the key.
const LIFETIME: Duration = Duration::from_secs(12 * 3600);

/// Makes and checks session cookies.
#[derive(Debug)]
pub(crate) struct Sessions {
    secret: [u8; 32],
}

impl Sessions {
    /// With a fresh secret.
    pub(crate) fn new() -> Self {
        Self { secret: rand::random() }
    }

    /// The value of a `Set-Cookie` header.
    pub(crate) fn cookie(&self, secure: bool) -> String {
        let expires_s = now_s() + LIFETIME.as_secs();
        let (mac, secure) = (self.mac(expires_s), if secure { "; Secure" } else { "" });
        format!(
            "{COOKIE}={expires_s:x}.{mac}; Path=/v1/bridge; Max-Age={}; HttpOnly; SameSite=Strict{secure}",
            LIFETIME.as_secs()
        )
    }

    /// Whether a `Cookie` header holds a session of this process that has not expired.
    pub(crate) fn accepts(&self, cookies: &str) -> bool {
        let value = cookies.split(';').find_map(|pair| pair.trim().strip_prefix(COOKIE)?.strip_prefix('='));
        let Some((expires, mac)) = value.and_then(|v| v.split_once('.')) else { return false };
        let Ok(expires_s) = u64::from_str_radix(expires, 16) else { return false };
        let right = bool::from(self.mac(expires_s).as_bytes().ct_eq(mac.as_bytes()));
        right && expires_s > now_s()
    }

    fn mac(&self, expires_s: u64) -> String {
        blake3::keyed_hash(&self.secret, &expires_s.to_le_bytes()).to_hex().to_string()
    }
}

/// Whether a request that a browser made comes from a page of this same server: other sites may open WebSockets to
/// any address, and the browser would send cookies along. Clients that are no browsers send no `Origin`.
pub(crate) fn same_origin(origin: Option<&str>, host: Option<&str>) -> bool {
    let Some(origin) = origin else { return true };
    let authority = origin.split_once("://").map(|(_, authority)| authority);
    authority.is_some() && authority == host
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(cookie: &str) -> String {
        cookie.split(';').next().unwrap().to_owned()
    }

    #[test]
    fn only_own_fresh_cookies_are_accepted() {
        let sessions = Sessions::new();
        let cookie = pair(&sessions.cookie(false));
        assert!(sessions.accepts(&cookie));
        assert!(sessions.accepts(&format!("theme=dark; {cookie}")));
        assert!(!Sessions::new().accepts(&cookie), "another process's secret");
        let old = format!("{COOKIE}={:x}.{}", now_s() - 1, sessions.mac(now_s() - 1));
        assert!(!sessions.accepts(&old), "expired");
        let (_, mac) = cookie.split_once('.').unwrap();
        assert!(
            !sessions.accepts(&format!("{COOKIE}=ffffffffff.{mac}")),
            "another expiry under the same proof"
        );
        for junk in ["", "pd_bridge_live", "pd_bridge_live=", "pd_bridge_live=.", "pd_bridge_live=zz.00"] {
            assert!(!sessions.accepts(junk), "{junk}");
        }
    }

    #[test]
    fn other_sites_may_not_look() {
        assert!(same_origin(None, Some("h:1")));
        assert!(same_origin(Some("http://h:1"), Some("h:1")));
        assert!(!same_origin(Some("http://evil.example"), Some("h:1")));
        assert!(!same_origin(Some("null"), Some("h:1")));
        assert!(!same_origin(Some("http://h:1"), None));
    }
}
