#!/bin/sh
# Sourced before `ray start` on EC2: tells Ray what this node is. Ray turns the first three into node labels
# (ray.io/market-type: spot or on-demand, ray.io/availability-zone, ray.io/availability-region).
# Where there is no metadata service it says so and leaves the environment as it was.

raypd_metadata=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}
raypd_metadata=${raypd_metadata%/}
raypd_token=$(curl -fsS --max-time 5 --retry 3 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' \
  "$raypd_metadata/latest/api/token" 2> /dev/null) || raypd_token=

raypd_ask() {
  curl -fsS --max-time 5 --retry 3 -H "X-aws-ec2-metadata-token: $raypd_token" "$raypd_metadata/latest/meta-data/$1" \
    2> /dev/null
}

if [ -n "$raypd_token" ]; then
  raypd_value=$(raypd_ask instance-life-cycle) && export RAY_NODE_MARKET_TYPE="$raypd_value"
  raypd_value=$(raypd_ask placement/availability-zone) && export RAY_NODE_ZONE="$raypd_value"
  raypd_value=$(raypd_ask placement/region) && export RAY_NODE_REGION="$raypd_value"
  raypd_value=$(raypd_ask instance-type) && export RAY_CLOUD_INSTANCE_TYPE_NAME="$raypd_value"
else
  echo "node-environment.sh: no EC2 metadata at $raypd_metadata; Ray's node labels stay empty" >&2
fi
unset raypd_metadata raypd_token raypd_value
