# Starts Apicurio like its official image: on port 8080 of all addresses, configured by the environment.
set -euo pipefail
exec /opt/stand-in/java/bin/java -Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Djava.awt.headless=true \
  -Dquarkus.http.host=0.0.0.0 -jar /opt/stand-in/app/quarkus-run.jar
