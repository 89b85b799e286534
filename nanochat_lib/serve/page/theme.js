// Runs before the first paint, so that a chosen theme does not flash. "" follows the system.
try {
  const theme = localStorage.getItem("nanochat.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage here (a private frame): the system's theme it is.
}
